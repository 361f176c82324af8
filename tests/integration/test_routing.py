# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What runs is the plan of the policy's table, layer by layer, and what the trace says, over one KV cache.

On a live ``vllm serve`` with concurrent requests too.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from openai import OpenAI
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from examples.vllm_server import vllm_serve
from flexquant.merge import merge_checkpoints
from tests.checkpoints import fold_final_norm, make_checkpoint, make_pair
from tests.integration.conftest import answers, engine, records_of
from tests.integration.live_server import complete, flexquant_options
from tests.policies import SWITCHING

pytestmark = pytest.mark.engine

CHUNK = 128


def expected_plan(phase: str, sequences: int) -> str:
    """Return the plan that ``phase-batch`` gives, written down by hand."""
    return "w4a16" if phase == "decode" and sequences <= 32 else "w8a8"


def request_lengths() -> list[tuple[int, int]]:
    """Return (tokens of prompt, tokens to generate): so many that more than 32 are answered at a time."""
    return [(3 + 37 * i % 200, 100 + 3 * i) for i in range(48)]


@pytest.fixture(scope="module")
def passes(tiny_merged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    trace = folder / "routes.jsonl"
    arguments = flexquant_options(policy="phase-batch", trace=str(trace))
    arguments += ["--enforce-eager", "--max-model-len", "1024", "--served-model-name", "tiny"]
    arguments += ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "64"]
    with vllm_serve(tiny_merged() / "merged", *arguments, log=folder / "server.log") as url:
        client = OpenAI(base_url=url, api_key="none")

        def ask(lengths: tuple[int, int]) -> int:
            return complete(client, [1] * lengths[0], lengths[1]).usage.completion_tokens

        with ThreadPoolExecutor(48) as pool:
            lengths = list(pool.map(ask, request_lengths()))
        assert lengths == [tokens for _, tokens in request_lengths()]
    header, *records = records_of(trace)
    assert header["policy"] == "phase-batch"
    return records


@pytest.mark.oldest
def test_phases_are_those_that_the_recorded_query_lengths_imply(passes):
    for record in passes:
        if record["phase"] == "decode":
            assert record["max_query_len"] == 1 and record["tokens"] == record["sequences"], record
        else:
            assert record["tokens"] > record["sequences"], record
        if record["sequences"] == 1 and record["tokens"] > 1:
            assert record["phase"] == "prefill", record


@pytest.mark.oldest
def test_all_phases_and_both_sides_of_the_batch_threshold_occur(passes):
    assert {record["phase"] for record in passes} == {"prefill", "decode", "mixed"}
    decode = [record["sequences"] for record in passes if record["phase"] == "decode"]
    assert min(decode) <= 32 < max(decode)


@pytest.mark.oldest
def test_every_forward_pass_took_the_plan_of_the_policys_table(passes):
    for record in passes:
        assert record["plan"] == expected_plan(record["phase"], record["sequences"]), record


LAYERS = 3
MODULES = [*(f"model.layers.{i}" for i in range(LAYERS)), "model.norm"]
SMALL = {"max_model_len": 128, "max_num_seqs": 4}


@dataclass
class Served:
    """An engine on variants with final norms and heads of their own, after one prompt and then two."""

    model: Any
    ran: list[tuple[str, str]]
    """The modules that ran, in order: the variant's name, and the module's name in it."""
    passes: list[dict[str, Any]]
    """The passes in the trace."""
    told_before: list[int]
    """How many passes the trace told of when each of them began to run."""
    registered: dict[str, Any]
    """The layers for which vLLM has allocated a part of the KV cache, keyed by name."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("views")
    merge_checkpoints(make_pair(folder, change=fold_final_norm, num_layers=LAYERS), folder / "merged")
    trace = folder / "trace.jsonl"
    ran: list[tuple[str, str]] = []
    with engine(folder / "merged", SWITCHING, flexquant={"trace": str(trace)}, **SMALL) as llm:
        (model,) = llm.apply_model(lambda model: model)
        for variant in model.variants:
            for module in MODULES:
                model.variants[variant].get_submodule(module).register_forward_hook(
                    lambda *_, place=(variant, module): ran.append(place)
                )
        told_before: list[int] = []
        for variant in model.variants.values():  # whose hooks the plans share
            variant.register_forward_pre_hook(lambda *_: told_before.append(len(records_of(trace)) - 1))
        for prompts in (["two", "prompts"], ["one"]):
            answers(llm, prompts, max_tokens=3, ignore_eos=True)
        passes = records_of(trace)[1:]
        registered = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        yield Served(model, ran, passes, told_before, registered)


def test_the_trace_tells_the_plan_of_every_pass_in_order(served: Served) -> None:
    told = [(p["phase"], p["sequences"], p["plan"]) for p in served.passes]
    assert told == [
        ("prefill", 2, "w8a8"),
        *[("decode", 2, "w4a16+w8a8[0]")] * 2,
        ("prefill", 1, "w8a8"),
        *[("decode", 1, "w4a16")] * 2,
    ]


def test_a_pass_is_told_once_its_plan_is_launched(served: Served) -> None:
    assert served.told_before == list(range(len(served.passes)))


def test_every_layer_is_run_by_the_plans_variant_and_followed_by_the_last_ones_norm(served: Served) -> None:
    layers = {"w8a8": ["w8a8"] * 3, "w4a16": ["w4a16"] * 3, "w4a16+w8a8[0]": ["w8a8", "w4a16", "w4a16"]}
    expected: list[tuple[str, str]] = []
    for p in served.passes:
        variants = layers[p["plan"]]
        expected += zip([*variants, variants[-1]], MODULES, strict=True)
    assert served.ran == expected


def test_logits_come_from_the_head_of_the_last_passes_plan(served: Served) -> None:
    dtype = served.model.variants["w8a8"].lm_head.weight.dtype
    hidden = torch.randn(2, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert served.passes[-1]["plan"] == "w4a16"
    logits, w8a8, w4a16 = (
        model.compute_logits(hidden) for model in (served.model, *served.model.variants.values())
    )
    assert list(served.model.variants) == ["w8a8", "w4a16"] and not torch.equal(w8a8, w4a16)
    assert torch.equal(logits, w4a16)


def test_all_variants_have_the_same_attention_modules_and_no_other_has_a_kv_cache(served: Served) -> None:
    for variant in served.model.variants.values():
        found = [module for module in variant.modules() if isinstance(module, AttentionLayerBase)]
        assert len(found) == LAYERS and set(found) == set(served.registered.values())
    assert len(served.registered) == LAYERS


def test_switching_between_variants_of_equal_weights_changes_nothing(tmp_path) -> None:
    """Nothing changes to the last bit: a variant goes on from the KV cache that the other one has written."""
    source = make_checkpoint(tmp_path / "source", scheme="w4a16", num_layers=LAYERS)
    merge_checkpoints({"w8a8": source, "w4a16": source}, tmp_path / "merged")

    def generate(folder, policy=None):
        with engine(folder, policy, **SMALL) as llm:
            return [answers(llm, prompts) for prompts in (["one"], ["two prompts", "side by side"])]

    assert generate(tmp_path / "merged", SWITCHING) == generate(source)
