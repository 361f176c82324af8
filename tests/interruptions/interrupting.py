# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Interrupt a command at a random moment, look at what it left, and run the same command to its end.

What it may leave: a folder of its own, or a file outside of such, is absent, as it was before, or as an
undisturbed run leaves it. What begins with a dot is out of sight: no command and no server reads it.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.interruptions.commands import Command, Digests
from tests.interruptions.started import SECONDS, Started

CHECKPOINT = "config.json"
ATTEMPTS = 4
"""Attempts for each interruption: a command that ended before its moment came does not count."""

Interruption = Callable[[Started], None]
"""Function that interrupts a running command; the command has ended when it returns."""


@dataclass
class Interrupted:
    """What came of a number of interruptions."""

    undisturbed_seconds: float
    times: int = 0
    found: Counter[str] = field(default_factory=Counter)
    """What the command left: names of what was whole, old, or out of sight."""


def attempts_in(work: Path) -> Path:
    """Return the folder, below ``work``, with all that the commands write."""
    return work / "attempts"


def interrupt_often(
    command: Command, work: Path, times: int, seed: int, interruption: Interruption
) -> Interrupted:
    """Interrupt a command ``times``, at moments drawn from its undisturbed run, in new folders.

    Raises AssertionError where it leaves something wrong, or the same command does not make it good.
    """
    inputs, attempts = work / "inputs", attempts_in(work)
    inputs.mkdir(parents=True)
    attempts.mkdir(exist_ok=True)
    command.make_inputs(inputs)
    before, expected, seconds = _undisturbed(command, inputs, attempts / "undisturbed")
    done, moments = Interrupted(round(seconds, 2)), random.Random(seed)
    for attempt in range(times * ATTEMPTS):
        if done.times == times:
            break
        folder = attempts / str(attempt)
        if _interrupt(command, inputs, folder, moments.uniform(0, seconds), interruption):
            done.times += 1
            left = command.look(folder / "output")
            done.found[check_left(left, before, expected, command.unfinished)] += 1
            _run_to_the_end(command, inputs, folder)
            assert command.look(folder / "output") == expected, f"not as undisturbed: {folder}"
        shutil.rmtree(folder)
    assert done.times == times, f"only {done.times} of {times} came before the command had ended"
    return done


def check_left(left: Digests, before: Digests, expected: Digests, unfinished: tuple[str, ...]) -> str:
    """Return in words what was left; raise AssertionError for what is neither old nor whole.

    ``unfinished``: ends of names of files that may lie in sight.
    """
    words = []
    for unit in sorted({*_units(before), *_units(expected)}):
        if present := _of(unit, left):
            ages = {"whole": expected, "old": before}
            age = next((age for age, digests in ages.items() if _of(unit, digests) == present), None)
            assert age, f"{unit} is neither whole nor as it was: {sorted(present)}"
            words.append(f"{unit} {age}")
    for name in sorted(left.keys() - before.keys() - expected.keys()):
        parts = name.split("/")
        hidden = next((i for i, part in enumerate(parts) if part.startswith(".")), None)
        assert hidden is not None or name.endswith(unfinished), f"{name} is left in sight"
        words.append(name if hidden is None else "/".join(parts[: hidden + 1]))
    return ", ".join(dict.fromkeys(words)) or "nothing"


def _units(digests: Digests) -> set[str]:
    """Return the checkpoint folders, and the files outside of these."""
    marker = f"/{CHECKPOINT}"
    folders = {name.removesuffix(marker) for name in digests if name.endswith(marker)}
    outside = {name for name in digests if not any(name.startswith(f"{folder}/") for folder in folders)}
    return folders | outside


def _of(unit: str, digests: Digests) -> Digests:
    return {name: value for name, value in digests.items() if name == unit or name.startswith(f"{unit}/")}


def _undisturbed(command: Command, inputs: Path, folder: Path) -> tuple[Digests, Digests, float]:
    """Return what is there before, what is there after, and the seconds between.

    The command runs twice: the first run also loads what all later ones find in memory.
    """
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        output = _prepare(command, inputs, folder)
        before = command.look(output)
        start = time.monotonic()
        _run_to_the_end(command, inputs, folder)
        seconds = time.monotonic() - start
    expected = command.look(output)
    shutil.rmtree(folder)
    return before, expected, seconds


def _prepare(command: Command, inputs: Path, folder: Path) -> Path:
    output = folder / "output"
    output.mkdir(parents=True)
    command.prepare(inputs, output)
    return output


def _start(command: Command, inputs: Path, folder: Path) -> Started:
    arguments = command.arguments(inputs, folder / "output")
    return Started(arguments, inputs.parent / "log", folder / "temporary", command.libraries)


def _interrupt(
    command: Command, inputs: Path, folder: Path, moment: float, interruption: Interruption
) -> bool:
    """Interrupt the command at its moment; return whether it still ran then."""
    _prepare(command, inputs, folder)
    started = _start(command, inputs, folder)
    ended = started.wait(moment) is not None
    (Started.kill if ended else interruption)(started)
    return not ended


def _run_to_the_end(command: Command, inputs: Path, folder: Path) -> None:
    started = _start(command, inputs, folder)
    status = started.wait(SECONDS)
    started.kill()
    assert status == 0, f"ended with {status}:\n{started.log.read_text()[-3000:]}"
