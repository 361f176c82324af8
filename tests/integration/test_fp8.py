# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""FP8 as the high-precision variant: vLLM's kernels for it, on a CPU PyTorch's, beside W4A16."""

from __future__ import annotations

import json

import pytest

from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import answers, engine

pytestmark = pytest.mark.engine

PROMPTS = ["hello world, this is a prompt", "abc", "xyz"]
VARIANTS = ("fp8", "w4a16")


def generate(folder, policy=None, **options):
    with engine(folder, policy, **options) as llm:
        return answers(llm, PROMPTS, max_tokens=8, ignore_eos=True)


def test_fp8_serves_prompts_and_w4a16_small_decode_batches(tmp_path):
    for scheme in VARIANTS:
        make_checkpoint(tmp_path / scheme, scheme=scheme)
    sources = {scheme: tmp_path / scheme for scheme in VARIANTS}
    merge_checkpoints(sources, tmp_path / "merged", policy="fp8-phase-batch")
    (tmp_path / "fp8.yaml").write_text("schema: flexquant.policy/v1\nrules:\n  - use: fp8\n")

    assert generate(tmp_path / "merged", str(tmp_path / "fp8.yaml")) == generate(tmp_path / "fp8")
    trace = tmp_path / "trace.jsonl"
    stored = generate(tmp_path / "merged", flexquant={"trace": str(trace)})
    assert stored not in [generate(tmp_path / scheme) for scheme in VARIANTS]
    _, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {(p["phase"] == "decode", p["plan"]) for p in passes} == {(False, "fp8"), (True, "w4a16")}
