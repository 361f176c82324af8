# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""An lm_head in INT8 beside stock vLLM on a checkpoint that stores the rounded head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexquant.merge import merge_checkpoints
from flexquant.serving.worker.int8_head import Int8HeadMethod
from flexquant.serving.worker.worker_extension import status_of
from tests.checkpoints import StateDict, make_checkpoint
from tests.integration.conftest import (
    answers,
    assert_alike,
    change,
    distance,
    engine,
    generate,
    read_policy,
)
from tests.integration.test_adapters import ATTENTION, make_adapter
from tests.integration.test_speculative import make_head

PROMPTS = ["The quick brown fox", "In the beginning was the word, and it took nine more words", "1, 2, 3"]
IN_INT8 = """schema: flexquant.policy/v1
head: int8
rules: [{use: w8a8}]
"""
EXACT = {"dtype": "float32", "max_model_len": 256}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows, inputs], each row rounded to a multiple of its 127th part."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight.float() / scale).round() * scale


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["llama", "tied llama", "gemma2"])
def test_logits_are_those_of_the_rounded_head(kind: str, tmp_path: Path) -> None:
    architecture = kind.removeprefix("tied ")
    tied = {"tie_word_embeddings": True} if kind.startswith("tied") else {}
    matrix = "model.embed_tokens.weight" if tied or kind == "gemma2" else "lm_head.weight"

    def with_an_unused_row(state: StateDict) -> StateDict:
        state[matrix][7] = 0
        return state

    def with_a_rounded_head(state: StateDict) -> StateDict:
        return state | {matrix: rounded(with_an_unused_row(state)[matrix])}

    shape = {"vocab_size": 331, **tied}
    sources = {
        scheme: make_checkpoint(
            tmp_path / scheme, architecture, scheme, transform=with_an_unused_row, **shape
        )
        for scheme in ("w8a8", "w4a16")
    }
    merge_checkpoints(sources, tmp_path / "merged")
    reference = make_checkpoint(
        tmp_path / "rounded", architecture, "w8a8", transform=with_a_rounded_head, **shape
    )
    (found,) = generate(tmp_path / "merged", [IN_INT8], PROMPTS, sampling={"prompt_logprobs": 3}, **EXACT)
    (expected,) = generate(reference, None, PROMPTS, sampling={"prompt_logprobs": 3}, **EXACT)
    (stored,) = generate(sources["w8a8"], None, PROMPTS, sampling={"prompt_logprobs": 3}, **EXACT)
    assert distance(found.answers[0], expected.answers[0]) < 1e-4
    assert distance(stored.answers[0], expected.answers[0]) > 1e-3


def holds_int8(model: Any) -> bool:
    return isinstance(model.lm_head.quant_method, Int8HeadMethod)


@pytest.mark.engine
def test_drafts_and_adapters_share_the_head(merged: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("one", 1, str(make_adapter(tmp_path / "one", 1, ATTENTION)))
    with engine(merged, IN_INT8, enable_lora=True, max_lora_rank=8, **EXACT) as llm:
        assert llm.apply_model(holds_int8) == [True]
        alone = answers(llm, PROMPTS, ignore_eos=True)
        assert answers(llm, PROMPTS, [adapter] * 3, ignore_eos=True) != alone
    draft = {"method": "eagle", "model": str(make_head(tmp_path / "eagle", "LlamaForCausalLM"))}
    drafting = {"speculative_config": {**draft, "num_speculative_tokens": 2}}
    with engine(merged, IN_INT8, **drafting, **EXACT) as llm:
        assert_alike(answers(llm, PROMPTS, ignore_eos=True), alone)


@pytest.mark.engine
def test_the_option_comes_before_the_policy_and_the_head_stays(merged: Path) -> None:
    with engine(merged, IN_INT8, flexquant={"head": "stored"}, **EXACT) as llm:
        assert llm.apply_model(holds_int8) == [False]
    with engine(merged, "w8a8", flexquant={"head": "int8"}, **EXACT) as llm:
        assert llm.apply_model(holds_int8) == [True]
        (status,) = llm.apply_model(status_of)
        assert "CPUW8A16LinearKernel" in status["kernels"]["w8a8"]
        assert "routes" in change(llm, "another", read_policy("w8a8").document)  # the option is the server's
    with engine(merged, IN_INT8, **EXACT) as llm:
        refused = change(llm, "another", read_policy("w8a8").document)["refused"]
        assert "'head: stored'" in refused and "'head: int8'" in refused
