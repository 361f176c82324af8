# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Architectures whose modules have other names in vLLM, or whose layers carry a state of their own."""

from __future__ import annotations

import pytest

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.architectures.chain import OPTIONS, make_variants, run
from tests.architectures.models import source
from tests.integration.conftest import engine

pytestmark = pytest.mark.engine

DERIVED = """
schema: flexquant.policy/v1
derive: {w4a8: {from: w4a16, activations: int8}}
rules:
  - when: {phase: prefill}
    use: w4a8
  - use: w4a16
"""


UNLIKE = {
    "GptOssForCausalLM": "the embedding is model.embed_tokens in checkpoints, and model.embedding in vLLM",
    "MellumForCausalLM": "a router's weight has two names in vLLM",
    "SolarForCausalLM": "states of earlier layers are mixed in, in training with another share",
    "HyperCLOVAXForCausalLM": "forward() takes its last arguments by name alone",
}
"""Architecture -> what it has that Llama has not."""


@pytest.mark.parametrize("architecture", UNLIKE)
def test_pure_plans_equal_stock_vllm(architecture, tmp_path):
    found = source(architecture, [])
    assert found is not None
    make_variants(architecture, *found, tmp_path)
    run(tmp_path)


def test_layers_with_a_state_are_refused_in_a_derived_variant(tmp_path):
    make_variants("FalconH1ForCausalLM", "falcon_h1", {}, tmp_path)
    merge_checkpoints({"w4a16": tmp_path / "w4a16"}, tmp_path / "merged")
    policy = tmp_path / "policy.yaml"
    policy.write_text(DERIVED)
    with (
        pytest.raises(FlexQuantError, match=r"\(MambaMixer2\) of FalconH1ForCausalLM keeps a state"),
        engine(tmp_path / "merged", str(policy), **OPTIONS),
    ):
        pass
