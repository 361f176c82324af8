# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merge each pair, and write the page of the outcomes."""

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

`python -m tests.publishers` merges pairs of small random checkpoints as publishers ship them
(`tests/publishers/shapes.py`). {merged} merge: they verify bit for bit, and answer as stock vLLM does from
each source that it serves on a CPU. {refused} are refused. Stock vLLM 0.32 loads both
checkpoints of {served} of these. They

{reasons}

## Merged

{pairs}

## Refused

| pair | reason |
|---|---|
"""
REASON = re.compile(r"(?:\([^)]*\)|(?!, (?:which|and vLLM|but) )[^;(])*")
"""Matches a message up to its explanation, or to its advice behind a semicolon outside of parentheses."""
NOT_SERVED = {
    "AutoAWQ's GEMV": "exceeds dimension size",
    "AutoGPTQ with desc_act": "desc_act=True",
    "GPTQ packed for Marlin": "down_proj.B'",
    "GPTQModel, other groups for a part of what vLLM fuses": "AssertionError",
    "AutoRound in FP8 without blocks": "Unsupported packing_format: auto_round:fp8_static",
    "Quark's INT8, other settings for a part of what vLLM fuses": (
        "different quantization configuration for ['q_proj', 'k_proj', 'v_proj']"
    ),
    "ModelOpt's INT8": "ModelOpt currently only supports",
}
"""Pairs that are refused, with a checkpoint that stock vLLM does not load -> what stock vLLM says of it."""
SERVED_APART = {
    "differ in what one checkpoint has once, and an option chooses": (
        *("bf16 and fp16", "another chat template", "other sampling defaults"),
        "Mistral with tekken.json on one side",
    ),
    "are not variants of one model": (
        *("the tokenizer of another base model", "other RoPE scaling", "another norm epsilon"),
    ),
    "cannot share a KV cache": ("FP8 scales of the cache on one side", "the same, AWQ with v to o folded"),
}
"""Why pairs are refused whose checkpoints stock vLLM loads."""


def outcome_of(shape: Shape, folder: Path) -> str:
    """Merge a pair; return MERGED, or the reason for which it is refused, without the paths of ``folder``."""
    sources = shape.write(folder)
    (folder / "policy.yaml").write_text(ONE_VARIANT)
    try:
        merge_checkpoints(sources, folder / MERGED, policy=str(folder / "policy.yaml"), **shape.options)
    except FlexQuantError as e:
        reason = re.sub(rf"{re.escape(str(folder))}/?", "", str(e)).replace("|", "\\|")
        return " ".join(reason.split())
    verify_checkpoint(folder / MERGED, sources)
    return MERGED


def row(shape: Shape, outcome: str) -> str:
    """Return a pair's line of the page, with what a refusal found, without explanation and advice."""
    if outcome == MERGED:
        return f"- {shape.name}"
    reason, _, _ = outcome.partition(". One ")
    found = REASON.match(reason)
    assert found is not None
    return f"| {shape.name} | {found[0]} |"


def page(outcomes: dict[str, str]) -> str:
    """Return the page in Markdown; ``outcomes`` are by the name of the pair."""
    merged, refused = ([s for s in SHAPES if (outcomes[s.name] == MERGED) is one] for one in (True, False))
    counts = {"merged": len(merged), "refused": len(refused), "served": len(refused) - len(NOT_SERVED)}
    reasons = "\n".join(f"- {why} ({len(names)})" for why, names in SERVED_APART.items())
    head = HEAD.format(**counts, reasons=reasons, pairs="\n".join(row(shape, MERGED) for shape in merged))
    return head + "\n".join(row(shape, outcomes[shape.name]) for shape in refused) + "\n"


def read_page() -> dict[str, str]:
    """Return what the page says of each pair: MERGED, or the reason for which it is refused."""
    text = PAGE.read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for shape in SHAPES:
        is_merged = row(shape, MERGED) in lines
        reason = text.partition(f"| {shape.name} | ")[2].partition(" |\n")[0]
        found[shape.name] = MERGED if is_merged else reason
    return found
