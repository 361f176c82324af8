# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Architectures whose modules have other names in vLLM, or whose passes differ from Llama's."""

from __future__ import annotations

import pytest

from tests.architectures.chain import make_variants, run
from tests.architectures.models import source

pytestmark = pytest.mark.engine

UNLIKE = {
    "GptOssForCausalLM": "the embedding is model.embed_tokens in checkpoints, and model.embedding in vLLM",
    "MellumForCausalLM": "a router's weight has two names in vLLM",
    "SolarForCausalLM": "states of earlier layers are mixed in, in training with another share",
    "HyperCLOVAXForCausalLM": "forward() takes its last arguments by name alone",
}
"""Architecture -> what it has that Llama has not."""


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name == "GptOssForCausalLM" else pytest.mark.full) for name in UNLIKE],
)
def test_pure_plans_equal_stock_vllm(architecture, tmp_path):
    found = source(architecture, [])
    assert found is not None
    make_variants(architecture, *found, tmp_path)
    run(tmp_path)
