# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""FP8 as the high-precision variant: vLLM's kernels for it, on a CPU PyTorch's, beside W4A16."""

from __future__ import annotations

import json

import pytest

from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import answers, engine, generate, take_policy
from tests.policies import rules

pytestmark = pytest.mark.engine

PROMPTS = ["hello world, this is a prompt", "abc", "xyz"]
SAMPLING = {"max_tokens": 8, "ignore_eos": True}
VARIANTS = ("fp8", "w4a16")
FP8 = rules("- use: fp8")


def test_fp8_serves_prompts_and_w4a16_small_decode_batches(tmp_path):
    for scheme in VARIANTS:
        make_checkpoint(tmp_path / scheme, scheme=scheme)
    sources = {scheme: tmp_path / scheme for scheme in VARIANTS}
    merge_checkpoints(sources, tmp_path / "merged", policy="fp8-phase-batch")

    trace = tmp_path / "trace.jsonl"
    with engine(tmp_path / "merged", flexquant={"trace": str(trace)}) as llm:
        stored = answers(llm, PROMPTS, **SAMPLING)
        header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
        take_policy(llm, FP8)
        fp8 = answers(llm, PROMPTS, **SAMPLING)
    assert header["policy"] == "the checkpoint's policy"
    assert {(p["phase"] == "decode", p["plan"]) for p in passes} == {(False, "fp8"), (True, "w4a16")}
    stock = {scheme: generate(tmp_path / scheme, None, PROMPTS, sampling=SAMPLING) for scheme in VARIANTS}
    assert [fp8] == stock["fp8"][0].answers
    assert [stored] not in [found[0].answers for found in stock.values()]
