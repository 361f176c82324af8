# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A fault: a small breakage of the product, with the fastest tests that should notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One text in one file, replaced by another so that the product still runs but does something else."""

    name: str
    breaks: str
    """What is wrong once the fault is planted, in one sentence."""
    file: str
    """Path of the broken file, relative to the repository's root."""
    old: str
    """The text that is replaced; the file holds it exactly once."""
    new: str
    tests: tuple[str, ...]
    """pytest's node ids; at least one of these tests has to fail."""
    environment: str = "serve"
    """The environment that the tests run in: ``serve``, ``quantize``, ``interpreter`` or ``ranks``.

    ``interpreter`` is ``serve`` with Triton's interpreter, for vLLM's V2 runner. ``ranks`` is ``serve`` with
    all cores, of which each rank takes one.
    """

    @property
    def room(self) -> str:
        """Return the broken file's room in flexquant/README.md; benchmarks are in the room measuring."""
        folder, inside, *_ = Path(self.file).with_suffix("").parts
        return {"merge": "merge", "policies": "policy", "benchmarks": "measuring"}.get(folder, inside)

    def plant(self, root: Path) -> None:
        """Break the source below ``root``; raise ValueError unless ``old`` is there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"fault '{self.name}' does not fit {self.file} any more: its text is there {count} times "
                "instead of once; write it anew in tests/faults/planted"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
