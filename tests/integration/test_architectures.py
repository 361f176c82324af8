# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A constant policy is the static checkpoint: the same tokens and logprobs, in every supported architecture.

Layered plans run, over one KV cache. And what only some architectures have: modules with other names in
vLLM, passes unlike Llama's, an lm_head that is tied.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import vllm

from flexquant.merge import merge_checkpoints
from tests.checkpoints import ARCHITECTURES, LATENT
from tests.conftest import rest_full
from tests.integration.conftest import answers, check_variants, engine, generate, take_policy
from tests.policies import rules
from tests.tied_heads import make_tied_pair

pytestmark = pytest.mark.engine

PROMPTS = ["hello world, this is a prompt of more than one chunk " * 3, "abc", "xyz 1", "xyz 2"]
LAYERED = rules(
    "- {when: {phase: [prefill, mixed]}, use: w8a8}",
    '- use: {default: w4a16, layers: {"0": w8a8, "-1": w8a8}}',
)
VARIANTS = ("w8a8", "w4a16")
SAMPLING = {"max_tokens": 8, "ignore_eos": True}
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512}
# The tests ask vLLM's oldest supported release about these architectures too.
ON_OLDEST = ("llama", "gemma3")
# Unlike each other in attention; a Llama is served below.
EVERY_DAY = ("gemma3", "deepseek_v2")


def marked(architecture: str) -> object:
    oldest, full = architecture in ON_OLDEST, architecture not in EVERY_DAY
    return pytest.param(architecture, marks=[pytest.mark.oldest] * oldest + [pytest.mark.full] * full)


@pytest.fixture
def vaultgemma_as_it_was() -> Iterator[None]:
    """Undo what serving VaultGemma does: vLLM turns transformers' class into one that only vLLM can build.

    Tests that make checkpoints of it in this process, without an engine, need the class as it was.
    """
    vault = import_module("transformers.models.vaultgemma.modeling_vaultgemma").VaultGemmaModel
    bases, members = vault.__bases__, dict(vars(vault))
    yield
    vault.__bases__ = bases
    for name in vars(vault).keys() - members.keys():
        delattr(vault, name)
    vault.__init__ = members["__init__"]


def check_plans(folder: Path, layered_policy: str, layered_plan: str) -> None:
    """Assert that the plans of both variants equal stock vLLM, and that a third plan decodes and differs."""
    sources, more = {variant: folder / variant for variant in VARIANTS}, [layered_policy]
    served = check_variants(folder / "merged", sources, PROMPTS, more=more, sampling=SAMPLING, **OPTIONS)
    w8a8, w4a16, layered = served
    assert [{p["plan"] for p in found.passes} for found in (w8a8, w4a16)] == [{"w8a8"}, {"w4a16"}]
    assert w8a8.answers != w4a16.answers
    plans = {(p["phase"] == "decode", p["plan"]) for p in layered.passes}
    assert plans == {(False, "w8a8"), (True, layered_plan)}
    assert layered.answers not in (w8a8.answers, w4a16.answers)


@pytest.mark.usefixtures("vaultgemma_as_it_was")
@pytest.mark.parametrize("architecture", [*map(marked, ARCHITECTURES | LATENT)])
def test_pure_plans_equal_stock_vllm_and_layered_plans_run(architecture, tiny_merged):
    is_oldest = vllm.__version__.startswith("0.26.")
    if architecture == "gemma3" and is_oldest and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM 0.26 itself ends on sliding windows where the CPU has AMX")
    check_plans(tiny_merged(architecture), LAYERED, "w8a8+w4a16[1-2]")


def test_variants_without_an_lm_head_share_the_embedding(tiny_merged):
    """Gemma 2's class in vLLM computes logits from the embedding itself, and has no lm_head."""
    with engine(tiny_merged("gemma2") / "merged", "phase", **OPTIONS) as llm:
        (found,) = llm.apply_model(
            lambda model: [(hasattr(v, "lm_head"), id(v.model.embed_tokens)) for v in model.variants.values()]
        )
    assert len(found) == 2 and len(set(found)) == 1 and found[0][0] is False


UNLIKE = {
    "GptOssForCausalLM": "the embedding is model.embed_tokens in checkpoints, and model.embedding in vLLM",
    "MellumForCausalLM": "a router's weight has two names in vLLM",
    "SolarForCausalLM": "states of earlier layers are mixed in, in training with another share",
    "HyperCLOVAXForCausalLM": "forward() takes its last arguments by name alone",
    "FalconForCausalLM": "decoder layers are transformer.h, with Q, K and V in one matrix",
    "GPTNeoXForCausalLM": "Q, K and V of each head are together; the head is embed_out",
}
"""Architecture -> what it has that Llama has not."""
OWN = ("other", "another")
"""Heads of their own of both variants of a tied model."""


@pytest.mark.parametrize("architecture", rest_full(UNLIKE, "GptOssForCausalLM"))
def test_plans_of_an_architecture_unlike_llama(architecture, tmp_path):
    from tests.architectures.chain import make_variants
    from tests.architectures.models import source

    found = source(architecture, [])
    assert found is not None
    make_variants(architecture, *found, tmp_path)
    merge_checkpoints({variant: tmp_path / variant for variant in VARIANTS}, tmp_path / "merged")
    check_plans(tmp_path, LAYERED, "w8a8+w4a16[1-2]")


@pytest.mark.parametrize("heads", rest_full((OWN, ("copy", None), ("other", None)), OWN), ids=str)
def test_every_variant_of_a_tied_model_has_the_head_that_stock_vllm_gives_it(heads, tmp_path):
    merged, sources = tmp_path / "merged", make_tied_pair(tmp_path, *heads)
    merge_checkpoints(sources, merged)
    w8a8, w4a16, phase = check_variants(merged, sources, PROMPTS, more=["phase"])
    (alone,) = generate(merged, ["w4a16"], PROMPTS)
    assert alone.answers == w4a16.answers
    (after_prompt, expected) = ([steps[0] for _, steps in s.answers[0]] for s in (phase, w8a8))
    assert after_prompt == expected


def test_a_model_that_is_tied_by_default_starts_without_the_key(tmp_path):
    sources = make_tied_pair(tmp_path, None, None, architecture="gemma3", key=False)
    merge_checkpoints(sources, tmp_path / "merged")
    (stock,) = generate(sources["w8a8"], None, PROMPTS)
    with engine(tmp_path / "merged") as llm:
        take_policy(llm, "w8a8")
        assert [answers(llm, PROMPTS)] == stock.answers


QUESTIONS = [
    "What is the capital of France?",
    "def fibonacci(n):",
    "The three laws of motion",
    "Once upon a time, in a village by the sea,",
]
LONG = "The harbour was quiet that morning, and the boats lay still. " * 20
CHUNK = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_chunked_prefill": True}
BATCH = [f"{question} ({i})" for i in range(4) for question in QUESTIONS]
BATCH[3] = LONG + BATCH[3]
BATCHES = ([QUESTIONS[0]], [LONG], BATCH)
"""One prompt alone, one prompt of four chunks alone, and sixteen prompts side by side."""


@pytest.fixture(scope="module")
def served(real_merged):
    """Return what the constant policies answer and the passes they take, keyed by variant."""
    variants = ["w8a8", "w4a16"]
    return dict(zip(variants, generate(real_merged, variants, *BATCHES, **CHUNK), strict=True))


@pytest.mark.parametrize("variant", ["w8a8", "w4a16"])
def test_constant_policy_equals_stock_vllm_on_the_variants_own_folder(variant, served, real_variants):
    (stock,) = generate(real_variants[variant], None, *BATCHES, **CHUNK)
    assert served[variant].answers == stock.answers


def test_prompts_came_in_chunks_and_side_by_side_and_the_variants_differ(served):
    """Otherwise the test above would show less than it says."""
    assert served["w8a8"].answers != served["w4a16"].answers
    for variant, found in served.items():
        passes = found.passes
        assert {p["plan"] for p in passes} == {variant}
        assert sum(p["tokens"] == CHUNK["max_num_batched_tokens"] for p in passes) > 3
        assert max(p["sequences"] for p in passes) > len(BATCH) / 2
