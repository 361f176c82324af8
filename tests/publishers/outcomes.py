# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merge each pair, and write the page of the outcomes."""

from __future__ import annotations

import re
from pathlib import Path

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, verify_checkpoint
from tests.publishers.shapes import SHAPES, Shape

PAGE = Path(__file__).parents[2] / "merge/PUBLISHERS.md"
MERGED = "merged"
ONE_VARIANT = "schema: flexquant.policy/v1\nrules: [{use: w4a16}]\n"
HEAD = """\
# Published pairs

`python -m tests.publishers` makes small random checkpoints as publishers ship them, in pairs of one model,
and merges them; `tests/publishers/shapes.py` says how each is made. The {merged} that are merged are verified
against their sources, bit for bit, and answer as stock vLLM does from each source that it serves on a CPU.
{refused} are refused.

| pair | outcome |
|---|---|
"""


def outcome_of(shape: Shape, folder: Path) -> str:
    """Merge a pair; return MERGED, or the reason for which it is refused, without the paths of ``folder``."""
    sources = shape.write(folder)
    (folder / "policy.yaml").write_text(ONE_VARIANT)
    try:
        merge_checkpoints(sources, folder / MERGED, policy=str(folder / "policy.yaml"), **shape.options)
    except FlexQuantError as e:
        reason = re.sub(rf"{re.escape(str(folder))}/?", "", str(e)).replace("|", "\\|")
        return f"refused: {' '.join(reason.split())}"
    verify_checkpoint(folder / MERGED, sources)
    return MERGED


def row(shape: Shape, outcome: str) -> str:
    return f"| {shape.name} | {outcome} |"


def page(outcomes: dict[str, str]) -> str:
    """Return the page in Markdown; ``outcomes`` are by the name of the pair."""
    merged = list(outcomes.values()).count(MERGED)
    rows = "\n".join(row(shape, outcomes[shape.name]) for shape in SHAPES)
    return HEAD.format(merged=merged, refused=len(outcomes) - merged) + rows + "\n"
