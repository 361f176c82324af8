# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A fault: a small breakage of the product, with the fastest tests that should see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One text in one file replaced by another, so that the product runs on but does something else."""

    name: str
    breaks: str
    """What is wrong then, in one sentence."""
    file: str
    """Relative to the repository's root."""
    old: str
    """Text that the file holds exactly once."""
    new: str
    tests: tuple[str, ...]
    """pytest's node ids, of which at least one has to fail."""
    environment: str = "serve"
    """The virtual environment that the tests run in, ``serve`` or ``quantize``; ``interpreter`` is ``serve``
    with Triton's interpreter, for vLLM's V2 runner."""

    @property
    def room(self) -> str:
        """The room of flexquant/README.md that the broken file lies in."""
        folder, inside, *_ = Path(self.file).with_suffix("").parts
        return {"merge": "merge", "policies": "policy"}.get(folder, inside)

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
