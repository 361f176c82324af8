# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Vision-language models in CUDA graphs: prompts with images have stock vLLM's answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from flexquant.merge import merge_checkpoints
from tests.gpu.conftest import ON_GPU, RUNNERS, generate
from tests.vision import KINDS, make_vision_checkpoint, prompts

pytestmark = [] if ON_GPU else pytest.mark.full
WITH_TORCHVISION = [
    pytest.param(kind, marks=pytest.mark.full)
    for kind in ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
    if find_spec("torchvision") is not None
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", ["idefics3", *WITH_TORCHVISION])
def test_a_constant_policy_equals_stock_vllm(kind: str, runner: str, tmp_path: Path) -> None:
    if kind == "qwen3_5" and runner == "V2" and not ON_GPU:
        pytest.skip("stock vLLM computes NaN for it in Triton's interpreter")
    sources = {v: make_vision_checkpoint(tmp_path / v, v, KINDS[kind]) for v in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged")
    stock, merged = (
        generate(folder, runner, "FULL_AND_PIECEWISE", policy, prompts(KINDS[kind]), tokens=8)
        for folder, policy in ((sources["w4a16"], None), (tmp_path / "merged", "w4a16"))
    )
    assert merged == stock
