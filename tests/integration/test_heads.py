# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""An lm_head that is stored quantised, or made INT8 as it is loaded, answers as stock vLLM's does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from flexquant.merge import merge_checkpoints, split_checkpoint
from flexquant.serving.worker.int8_head import Int8HeadMethod
from flexquant.serving.worker.worker_extension import status_of
from tests.checkpoints import StateDict, Transform, make_checkpoint
from tests.conftest import rest_full
from tests.foreign import write_foreign
from tests.integration.conftest import (
    answers,
    assert_alike,
    change,
    check_variants,
    distance,
    engine,
    generate,
    read_policy,
)
from tests.integration.test_adapters import ATTENTION, make_adapter
from tests.integration.test_speculative import make_head
from tests.policies import rules
from tests.quantised_heads import quantise_head, write_pair

pytestmark = pytest.mark.engine

PROMPTS = ["The quick brown fox", "In the beginning was the word, and it took nine more words", "1, 2, 3"]
OPTIONS = {"dtype": "bfloat16", "max_model_len": 256, "sampling": {"prompt_logprobs": 3, "max_tokens": 8}}
WEIGHTS_ALONE = ("w8a16", "w4a16", "w4a16 by channel", "w4a16 with zero points")
FORMS = dict.fromkeys(WEIGHTS_ALONE, 0.01) | {"w8a8": 0.02, "fp8": 0.05}
"""Scheme of a head -> most that stock vLLM differs, in nats, from the same model with the head in 16 bit."""
PAIRS = [
    ("w8a8", "fp8"),
    ("w4a16 with zero points", "w4a16 with zero points"),
    pytest.param(("w8a16", "w4a16 by channel"), marks=pytest.mark.full),
]
"""Schemes of the heads of w8a8 and w4a16; equal heads are stored once."""
BOTH = ("w8a8", "w4a16")
IN_INT4 = rules("- use: w4a16")


@pytest.mark.parametrize("heads", PAIRS, ids=str)
def test_each_variant_answers_as_stock_vllm(heads: tuple[str, str], tmp_path: Path) -> None:
    sources = write_pair(tmp_path, *heads)
    merge_checkpoints(sources, tmp_path / "merged")
    served = check_variants(tmp_path / "merged", sources, PROMPTS, **OPTIONS)
    for form, variant, found in zip(heads, sources, served, strict=True):
        (plain,) = generate(tmp_path / f"{variant}-plain", None, PROMPTS, **OPTIONS)
        assert distance(found.answers[0], plain.answers[0]) < FORMS[form]


def test_each_variant_multiplies_by_its_own_head(tmp_path: Path) -> None:
    sources = write_pair(tmp_path, "w8a16", None)
    merge_checkpoints(sources, tmp_path / "merged")
    more = {"more": ["phase", "w4a8"], **OPTIONS}
    *_, phases, w4a8 = check_variants(tmp_path / "merged", sources, PROMPTS, **more)
    assert {(p["phase"], p["plan"]) for p in phases.passes} == {("prefill", "w8a8"), ("decode", "w4a16")}
    assert {p["plan"] for p in w4a8.passes} == {"w4a8"}


@pytest.mark.parametrize("head", rest_full(("w8a16", "w4a16", "gptq"), "w4a16", "gptq"))
def test_one_copy_of_a_published_checkpoint_has_its_head(head: str, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", scheme="w4a16", vocab_size=384)
    folder = quantise_head(made, tmp_path / "int4", head if head in FORMS else "w4a16")
    if head not in FORMS:
        folder = write_foreign(folder, tmp_path / "foreign", head, lm_head=True)
    (stock,) = generate(folder, None, PROMPTS, **OPTIONS)
    published = {"config_format": "flexquant", **OPTIONS}
    alone, one_copy = generate(folder, [IN_INT4, "one-copy"], PROMPTS, **published)
    assert alone.answers == stock.answers
    assert {p["plan"] for p in one_copy.passes} == {"w8a8-from-int4", "w4a16"}
    assert distance(one_copy.answers[0], stock.answers[0]) < 0.2
    merge_checkpoints({"w4a16": folder}, tmp_path / "merged")
    (merged,) = generate(tmp_path / "merged", [IN_INT4], PROMPTS, **OPTIONS)
    assert distance(merged.answers[0], stock.answers[0]) < 0.01


def test_nested_variants_have_their_heads(tmp_path: Path) -> None:
    sources = write_pair(tmp_path, "w8a8", "w4a16")
    merge_checkpoints(sources, tmp_path / "merged", nested="near")
    split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "split")
    in_int8, in_int4 = generate(tmp_path / "merged", ["w8a8", "w4a16"], PROMPTS, **OPTIONS)
    (int8,) = generate(tmp_path / "split", None, PROMPTS, **OPTIONS)
    (int4,) = generate(sources["w4a16"], None, PROMPTS, **OPTIONS)
    own, other = (distance(in_int8.answers[0], of.answers[0]) for of in (int8, int4))
    assert own < 0.03 and own < other / 2, (own, other)
    assert distance(in_int4.answers[0], int4.answers[0]) < 0.01


IN_INT8 = rules("- use: w8a8") + "head: int8\n"
EXACT = {"dtype": "float32", "max_model_len": 256}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows, inputs], each row rounded to a multiple of its 127th part."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight.float() / scale).round() * scale


@pytest.mark.parametrize("kind", rest_full(("llama", "tied llama", "gemma2"), "tied llama", "gemma2"))
def test_logits_are_those_of_the_rounded_head(kind: str, tmp_path: Path) -> None:
    architecture = kind.removeprefix("tied ")
    tied = {"tie_word_embeddings": True} if kind.startswith("tied") else {}
    matrix = "model.embed_tokens.weight" if tied or kind == "gemma2" else "lm_head.weight"

    def with_an_unused_row(state: StateDict) -> StateDict:
        state[matrix][7] = 0
        return state

    def with_a_rounded_head(state: StateDict) -> StateDict:
        return state | {matrix: rounded(with_an_unused_row(state)[matrix])}

    def make(name: str, scheme: str, transform: Transform) -> Path:
        shape = {"vocab_size": 331, **tied}
        return make_checkpoint(tmp_path / name, architecture, scheme, transform=transform, **shape)

    sources = {scheme: make(scheme, scheme, with_an_unused_row) for scheme in BOTH}
    merge_checkpoints(sources, tmp_path / "merged")
    reference = make("rounded", "w8a8", with_a_rounded_head)
    asked = {"sampling": {"prompt_logprobs": 3}, **EXACT}
    (found,) = generate(tmp_path / "merged", [IN_INT8], PROMPTS, **asked)
    (expected,), (stored,) = (generate(one, None, PROMPTS, **asked) for one in (reference, sources["w8a8"]))
    assert distance(found.answers[0], expected.answers[0]) < 1e-4
    assert distance(stored.answers[0], expected.answers[0]) > 1e-3


def holds_int8(model: Any) -> bool:
    return isinstance(model.lm_head.quant_method, Int8HeadMethod)


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


def test_drafts_look_up_tokens_in_a_tied_head(tmp_path: Path) -> None:
    sources = {name: make_checkpoint(tmp_path / name, scheme=name, tie_word_embeddings=True) for name in BOTH}
    merge_checkpoints(sources, tmp_path / "merged")
    draft = {"method": "eagle", "model": str(make_head(tmp_path / "eagle", "LlamaForCausalLM"))}
    drafting = {"speculative_config": {**draft, "num_speculative_tokens": 2}}
    with engine(tmp_path / "merged", IN_INT8, **drafting, **EXACT) as llm:
        (drafter,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
        shared = drafter.model.model.embed_tokens if current_platform.is_cpu() else drafter.model.lm_head
        assert isinstance(shared.quant_method, Int8HeadMethod)


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
