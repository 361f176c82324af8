# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Match names against regular expressions that anybody may have written, in a process with a time limit."""

import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

PREFIX = "re:"
"""Begins a regular expression of compressed-tensors; other patterns are names."""
LEFT_OUT = "-:"
"""Begins an expression in GPTQModel's ``dynamic`` for linears that are not quantised; "+:" others."""
SECONDS, MIB = 10, 1024
"""Processor time and memory that a checkpoint's expressions may take for all its names."""
Fits = dict[str, frozenset[str]]
"""What is written for an expression -> the names that it fits."""
PROGRAM = Path(__file__).with_name("pattern_process.py")


def fitting(expressions: Mapping[str, str], names: Iterable[str], owner: str, place: str = "") -> Fits:
    """Return those of ``names`` that each regular expression fits from their start, by what is written.

    Raises FlexQuantError, which begins with ``owner``, for a wrong one, and for one that reaches the bound.
    """
    if not expressions:
        return {}
    found: Fits = {}
    answers = _fitting(tuple(expressions.values()), tuple(dict.fromkeys(names)))
    for text, answer in zip_longest(expressions, answers):
        if isinstance(answer, frozenset):
            found[text] = answer
            continue
        verdict, problem = "cannot be used", f"takes more than {SECONDS} s or {MIB} MiB to match"
        advice = "write a simpler one, or list the names"
        if answer is not None:
            verdict, problem = "is not understood", f"is no regular expression ({answer})"
            advice = "correct it, or get the checkpoint again"
        named = f"{owner} has a quantization_config that {verdict}: {text!r}{place}"
        raise FlexQuantError(f"{named} {problem}; {advice}")
    return found


def expressions_of_dynamic(section: JsonObject) -> dict[str, str]:
    """Return the expressions of GPTQModel's ``dynamic`` by what is written; those of LEFT_OUT leave out."""
    dynamic = section.get("dynamic")
    written = dynamic if isinstance(dynamic, dict) else ()
    return {text: text.removeprefix(LEFT_OUT).removeprefix("+:") for text in written}


@lru_cache(maxsize=8)
def _fitting(expressions: tuple[str, ...], names: tuple[str, ...]) -> list[frozenset[str] | str]:
    """Return what each expression fits, or what is wrong with it, up to the one that reached a bound."""
    command = [sys.executable, "-P", str(PROGRAM), str(SECONDS), str(MIB << 20)]
    asked = json.dumps([expressions, names])
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]
    return [fits if isinstance(fits, str) else frozenset(names[i] for i in fits) for fits in found]


class Patterns:
    """Names and, after ``re:``, regular expressions, of which the first that fits a module counts."""

    def __init__(self, patterns: Iterable[str], names: Collection[str], owner: str) -> None:
        """Match the ``names`` that will be asked for; raise FlexQuantError as :func:`fitting` does."""
        self._order = {pattern: number for number, pattern in enumerate(dict.fromkeys(patterns))}
        self._owner, self._names = owner, frozenset(names)
        self._fits = self._match(names)

    def _match(self, names: Collection[str]) -> Fits:
        expressions = {p: p.removeprefix(PREFIX) for p in self._order if p.startswith(PREFIX)}
        return fitting(expressions, names, self._owner)

    def fitting(self, name: str) -> list[str]:
        """Return the regular expressions that fit a name, ``re:`` included, and the name if it is listed."""
        known = self._fits if name in self._names else self._match([name])
        found = [pattern for pattern, names in known.items() if name in names]
        return sorted(found + [name] * (name in self._order), key=self._order.__getitem__)

    def first(self, name: str) -> str | None:
        return next(iter(self.fitting(name)), None)
