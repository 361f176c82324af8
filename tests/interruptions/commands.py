# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands that are killed: what they work on, and what they may leave behind.

Each is given so that the same command may run again: what it finished is kept or replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flexquant.merge import merge_checkpoints
from flexquant.policy.rules import load_policy
from tests.checkpoints import make_checkpoint
from tests.quantize.folders import digests

Digests = dict[str, str]
"""Path of a file -> its SHA-256, or what else has to be equal of it."""

FEW = ["--samples", "4", "--length", "64"]
LARGER = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32768, "num_layers": 2}
"""A large vocabulary, so that a merge writes for longer than it compares."""
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def tuned(folder: Path) -> Digests:
    """Return what ``flexquant tune`` leaves; of policies, only the sizes that they were measured at."""
    found = digests(folder)
    for name in found:
        if name.endswith(".yaml"):
            measured = load_policy(str(folder / name)).measured
            assert measured is not None
            found[name] = str(
                [{v: list(c) for v, c in curves.items()} for curves in (measured.decode, measured.prefill)]
            )
        if name.endswith(".png"):
            data = (folder / name).read_bytes()
            assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82"), f"{name} is cut off"
            found[name] = "a whole picture"
    return found


@dataclass(frozen=True)
class Command:
    """One command line, and how the test looks at what it writes."""

    make_inputs: Callable[[Path], object]
    """Function that writes into a folder what the command reads."""
    arguments: Callable[[Path, Path], list[str]]
    """Function of the folder with the inputs and the folder to write into, which returns the arguments."""
    libraries: tuple[str, ...] = ()
    """Libraries that are imported before the command starts; its time counts from there."""
    look: Callable[[Path], Digests] = digests
    prepare: Callable[[Path, Path], object] = field(default=lambda inputs, output: None)
    """Function that puts into the output folder what is there before the command runs."""
    unfinished: tuple[str, ...] = ()
    """Endings of the visible files that an unfinished run may leave; nobody takes them for a result."""


def _sources(inputs: Path) -> dict[str, Path]:
    return {scheme: inputs / scheme for scheme in ("w8a8", "w4a16")}


def _make_sources(inputs: Path) -> None:
    for scheme, folder in _sources(inputs).items():
        make_checkpoint(folder, scheme=scheme, **LARGER)


def _make_model(inputs: Path) -> None:
    make_checkpoint(inputs / "model", scheme=None)


def _make_merged(inputs: Path) -> None:
    for scheme, folder in _sources(inputs).items():
        make_checkpoint(folder, scheme=scheme)
    merge_checkpoints(_sources(inputs), inputs / "merged")
    (inputs / "text.txt").write_text(TEXT)


def _merge(inputs: Path, output: Path) -> list[str]:
    named = [f"{name}={folder}" for name, folder in _sources(inputs).items()]
    return ["merge", *named, "--output", str(output / "merged"), "--overwrite"]


def _merge_one(inputs: Path, output: Path) -> None:
    merge_checkpoints({"w8a8": inputs / "w8a8"}, output / "merged")


def _quantize(inputs: Path, output: Path) -> list[str]:
    return ["quantize", str(inputs / "model"), "--output", str(output / "variants"), "--resume", *FEW]


def _build(inputs: Path, output: Path) -> list[str]:
    return ["build", str(inputs / "model"), "--output", str(output / "merged"), *FEW]


def _eval(inputs: Path, output: Path) -> list[str]:
    sizes = ["--batch-sizes", "2", "--samples", "2", "--prompt-tokens", "16", "--tokens", "8"]
    text = ["--text", str(inputs / "text.txt"), "--policies", "phase"]
    return ["eval", str(inputs / "merged"), *text, *sizes, "--output", str(output / "results")]


def _tune(inputs: Path, output: Path) -> list[str]:
    sizes = ["--rounds", "1", "--max-rounds", "1", "--max-batch", "4", "--max-tokens", "64"]
    written = ["--output", str(output / "policy.yaml"), "--overwrite"]
    return ["tune", str(inputs / "merged"), "--quick", *sizes, *written]


ENGINE = ("tests.interruptions.engine_at_hand",)
MERGING = ("flexquant.cli.merge", "flexquant.merge", "flexquant.merge.kv.compatibility")
QUANTIZING = ("flexquant.build", "llmcompressor", "flexquant.quantization.oneshot")

COMMANDS = {
    "merge": Command(_make_sources, _merge, MERGING),
    "merge-over-another": Command(_make_sources, _merge, MERGING, prepare=_merge_one),
    "quantize": Command(_make_model, _quantize, QUANTIZING),
    "build": Command(_make_model, _build, QUANTIZING),
    "eval": Command(_make_merged, _eval, ENGINE),
    "tune": Command(_make_merged, _tune, ENGINE, look=tuned, unfinished=(".samples.json",)),
}
