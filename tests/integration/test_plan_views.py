# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What runs is what the trace says, layer by layer, with the right norm and head, over one KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from flexquant.merge import merge_checkpoints
from tests.checkpoints import fold_final_norm, make_checkpoint, make_pair
from tests.integration.conftest import answers, engine, records_of
from tests.policies import SWITCHING

pytestmark = pytest.mark.engine

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
