# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every supported architecture: pure plans equal stock vLLM, layered plans run, over one KV cache."""

from __future__ import annotations

import json

import pytest

from tests.checkpoints import ARCHITECTURES
from tests.integration.conftest import answers, engine

pytestmark = pytest.mark.engine

PROMPTS = ["hello world, this is a prompt of more than one chunk " * 3, "abc", "xyz 1", "xyz 2"]
LAYERED = """
schema: flexquant.policy/v1
rules:
  - when: {phase: [prefill, mixed]}
    use: w8a8
  - use: {default: w4a16, layers: {"0": w8a8, "-1": w8a8}}
"""


def generate(folder, policy=None, **options):
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512, **options}
    with engine(folder, policy, **options) as llm:
        return answers(llm, PROMPTS, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pure_plans_equal_stock_vllm_and_layered_plans_run(architecture, tiny_merged, tmp_path):
    folder = tiny_merged(architecture)
    pure = {}
    for variant in ("w8a8", "w4a16"):
        pure[variant] = generate(folder / "merged", policy=variant)
        assert pure[variant] == generate(folder / variant), variant
    assert pure["w8a8"] != pure["w4a16"]

    (tmp_path / "layered.yaml").write_text(LAYERED)
    trace = tmp_path / "routes.jsonl"
    layered = generate(
        folder / "merged", policy=str(tmp_path / "layered.yaml"), flexquant={"trace": str(trace)}
    )
    passes = [json.loads(line) for line in trace.read_text().splitlines()][1:]
    plans = {(p["phase"] == "decode", p["plan"]) for p in passes}
    assert plans == {(False, "w8a8"), (True, "w8a8+w4a16[1-2]")}
    assert layered not in pure.values()
