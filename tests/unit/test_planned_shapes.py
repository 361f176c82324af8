# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""KV cache, experts and ranks' parts of models of many kinds, from a config.json as each writes it."""

import ast
import importlib.util
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexquant.planning.device import HUMMING, MARLIN, W4A8, W4A8_INT8, load_device
from flexquant.planning.planned_model import QKV, REPLICATED, ROW_PARALLEL, Linear, ModelShape, PlannedModel
from flexquant.planning.roofline import linear_seconds
from flexquant.policy.rules import load_policy
from tests.checkpoints import base_config
from tests.prediction import planned
from tests.refusals import refused

SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2}
GRANITE = {"layer_types": ["mamba", "mamba", "attention"], "num_local_experts": 0}
GRANITE |= {"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 64}
HYBRIDS: dict[str, tuple[dict[str, Any], int, int]] = {
    # (config, layers with attention, their head size)
    "qwen3_next": ({"num_hidden_layers": 48, "head_dim": 64}, 12, 64),  # every fourth layer
    "qwen3_next in thirds": ({"num_hidden_layers": 6, "full_attention_interval": 3, "head_dim": 64}, 2, 64),
    "granitemoehybrid": (GRANITE, 1, 32),  # a list by layer
    "bamba": ({"num_hidden_layers": 3, "attn_layer_indices": [1]}, 1, 32),
    "jamba": ({"num_hidden_layers": 8, "num_experts": 2}, 1, 32),  # period and offset
    "nemotron_h": ({"hybrid_override_pattern": "M*-M*-", "head_dim": 32}, 2, 32),
    "lfm2": ({"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}, 1, 32),
    "falcon_h1": ({"num_hidden_layers": 3, "head_dim": 32}, 3, 32),  # both in each layer
    "gemma3_text": ({"num_hidden_layers": 6, "head_dim": 64, "sliding_window": 64}, 6, 64),  # windows count
}
"""Model type -> fields beside SMALL."""


def shape(folder: Path, config: dict[str, Any], devices: int = 1) -> ModelShape:
    return planned(folder, config).shape(("w4a16",), devices, {})


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_with_attention_alone_have_a_kv_cache(kind, tmp_path):
    """Two KV heads, for keys and for values, of two bytes a number; 8 query heads."""
    fields, layers, head = HYBRIDS[kind]
    config = SMALL | fields | {"model_type": kind.split()[0]}
    one, two, four = (shape(tmp_path, config, devices) for devices in (1, 2, 4))
    assert one.kv_bytes_per_token == layers * 2 * 2 * head * 2
    assert one.attention_flops == layers * 8 * head * 4
    assert two.kv_bytes_per_token == four.kv_bytes_per_token == layers * 2 * 1 * head * 2
    assert four.attention_flops == layers * 2 * head * 4


def test_layers_may_have_heads_of_their_own_or_read_the_cache_of_others(tmp_path):
    """Gemma 4 has five layers with windows to one without, of larger heads; the last two store nothing."""
    config = {**SMALL, "model_type": "gemma4_text", "num_hidden_layers": 8, "head_dim": 32}
    config |= {"global_head_dim": 96, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 320}
    found = shape(tmp_path, config)
    assert found.kv_bytes_per_token == (5 * 32 + 96) * 2 * 2 * 2
    assert found.attention_flops == (5 * 32 + 96 + 32 + 96) * 8 * 4
    # Of 8 heads and 2 KV heads, each of 4 devices has two and one.
    of_four = {linear.outputs for linear in shape(tmp_path, config, 4).linears["w4a16"]}
    assert {(2 + 1 + 1) * 32, (2 + 1 + 1) * 96} <= of_four


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
GPT = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 320}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "mamba", **SIZES}, "has no attention, and passes of such a model cannot be"),
        ({"model_type": "falcon_mamba", **SIZES}, "has no attention, and passes of such a model cannot be"),
        # GPT-2 holds its weights turned, in a class of its own.
        ({"model_type": "gpt2", **GPT}, "has no linears in decoder layers"),
        (base_config("deepseek_v2", num_layers=2).to_dict(), "has multi-head latent attention, and passes"),
    ],
)
def test_a_model_that_cannot_be_predicted_is_refused(config, problem, tmp_path):
    with refused(problem):
        shape(tmp_path, config)


def test_sizes_have_the_names_that_the_class_gives_them(tmp_path):
    found = shape(tmp_path, {"model_type": "gptj", "rotary_dim": 8, **GPT})
    assert found.kv_bytes_per_token == 2 * 2 * 64 * 2


HUNYUAN = {"model_type": "hunyuan_v1_moe", "num_experts": 8, "pad_token_id": 0}
QWEN = {"model_type": "qwen3_moe", "num_experts": 8}
MIXTURES: list[tuple[dict[str, Any], int]] = [
    (QWEN | {"num_experts_per_tok": 3}, 3),
    (QWEN | {"num_experts_per_tok": 1}, 1),
    ({"model_type": "mixtral"}, 2),  # the class's default
    ({"model_type": "ernie4_5_moe", "moe_k": 6, "moe_num_experts": 8}, 6),
    (HUNYUAN | {"moe_topk": 3}, 3),
    (HUNYUAN | {"moe_topk": [3, 3]}, 3),  # by layer
    ({"model_type": "aria_text", "moe_topk": 3, "moe_num_experts": 8}, 3),
]
MOE = {**SMALL, "num_hidden_layers": 2, "head_dim": 32, "moe_intermediate_size": 64}


@pytest.mark.parametrize(("config", "active"), MIXTURES)
def test_the_experts_of_a_token_are_those_that_the_class_reads(config, active, tmp_path):
    found = {linear.active_experts for linear in shape(tmp_path, MOE | config).linears["w4a16"]}
    assert found == {1, active}, "linears beside the experts, and experts"


def test_two_experts_are_experts(tmp_path):
    two = planned(tmp_path, MOE | {"model_type": "mixtral", "num_local_experts": 2})
    assert two.has_experts
    assert {x.active_experts for x in two.shape(("w8a8",), 1, {}).linears["w8a8"] if x.experts == 2} == {2}
    assert not planned(tmp_path, MOE | {"model_type": "qwen3"}).has_experts


@pytest.mark.parametrize("config", [HUNYUAN | {"moe_topk": [3, 4]}, QWEN | {"num_experts_per_tok": 0}])
def test_a_number_of_experts_that_is_not_known_is_refused(config, tmp_path):
    with refused("has experts, and num_experts_per_tok .* does not say how many"):
        shape(tmp_path, MOE | config)


def test_experts_that_are_held_turned_have_the_sizes_of_others(tmp_path):
    """gpt-oss holds [inputs, outputs]; gate and up have 2 x 96 outputs, 8 = 4 x 2 devices share them."""
    config = {**SMALL, "model_type": "gpt_oss", "num_hidden_layers": 1, "head_dim": 32}
    config |= {"num_local_experts": 4, "intermediate_size": 96, "num_experts_per_tok": 2}
    half = shape(tmp_path, config, 2).linears["w4a16"]
    experts = {(x.outputs, x.inputs, x.experts, x.active_experts) for x in half if x.experts > 1}
    assert experts == {(96, 256, 4, 2), (256, 48, 4, 2)}
    assert Linear(4, 256, 2 * 4 * 256, "bf16") in half, "the router is whole"


def test_ranks_beyond_the_kv_heads_hold_one_twice(tmp_path, merged):
    """8 devices: of 8 query heads one, of 2 KV heads one each; of 32 x 256 weights a head."""
    config = {**SMALL, "model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 32}
    for devices, heads in ((1, 8 + 2 + 2), (2, 4 + 1 + 1), (8, 1 + 1 + 1)):
        found = planned(tmp_path, config).shape(("w8a8",), devices, {}).linears["w8a8"]
        assert Linear(heads * 32, 256, heads * 32 * (256 + 2), "w8a8") in found
    model = PlannedModel.read(str(merged))
    one, two, four = (model.shape(("w4a16",), n, {}).kv_bytes_per_token for n in (1, 2, 4))
    assert one == 2 * 2 * 2 * 32 * 2 and two == four == one / 2
    with refused("4 attention heads and 2 KV heads, which 3 devices cannot"):
        model.shape(("w4a16",), 3, {})


ONE_COPY = load_policy("one-copy").derived


def test_int8_computed_from_int4_is_no_second_copy(merged):
    """It needs its source's weights in a layout that it reads, and memory for the largest linear."""
    model = PlannedModel.read(str(merged))
    plain, one = (model.shape(("w8a8", "w4a16"), 1, derived) for derived in ({}, ONE_COPY))
    assert list(one.linears) == ["w8a8", "w4a16", "w8a8-from-int4"]
    stored = 512 * 128 / 2 + 2 * 512
    assert Linear(512, 128, 512 * 128, "w8a8", source_bytes=stored) in one.linears["w8a8-from-int4"]
    assert sum(one.linears["w8a8-from-int4"].values()) == sum(one.linears["w4a16"].values())
    assert one.resident_bytes == plain.resident_bytes + 512 * 128
    assert model.shape(("w4a16",), 2, ONE_COPY).own_bytes["w8a8-from-int4"] == 512 * 128 / 2
    read = {replace(linear, choice=(MARLIN, HUMMING)): n for linear, n in plain.linears["w4a16"].items()}
    assert one.linears["w4a16"] == read


def test_a_nested_variant_stores_4_bits_factors_and_exceptions(merged):
    plain = PlannedModel.read(str(merged)).shape(("w8a8", "w4a16"), 1, {})
    nested = plain.with_nested("w8a8", "w4a16")
    int4, stored = 512 * 128 / 2 + 2 * 512, 512 * 128 / 2 + 4 * (512 + 512 + 128) + 3 * 512
    assert Linear(512, 128, 512 * 128, "w8a8", 1, 1, int4, stored) in nested.linears["w8a8"]
    linears = nested.linears["w8a8"].items()
    weights = sum(x.outputs * x.inputs * n for x, n in linears)
    factors = sum((8 * x.outputs + 4 * x.inputs) * n for x, n in linears)
    exceptions = sum(3 * x.outputs * -(-x.inputs // 128) * n for x, n in linears)
    assert nested.own_bytes["w8a8"] == weights / 2 + factors + exceptions + 512 * 128
    assert nested.own_bytes["w4a16"] == plain.own_bytes["w4a16"]
    assert {linear.choice for linear in nested.linears["w4a16"]} == {(MARLIN, HUMMING)}


@pytest.mark.parametrize("devices", [1, 2])
def test_w4a8_beside_w4a16_is_a_second_copy_of_int4(merged, devices):
    model = PlannedModel.read(str(merged))
    alone = model.shape(("w4a16",), devices, {})
    twice = model.shape(("w4a16",), devices, load_policy("single-copy").derived)
    assert twice.own_bytes == {"w4a16": alone.own_bytes["w4a16"], "w4a8": alone.own_bytes["w4a16"]}
    assert {linear.scheme for linear in twice.linears["w4a8"]} == {W4A8_INT8}
    assert twice.linears["w4a16"] == alone.linears["w4a16"]
    assert model.shape((W4A8,), devices, {}).resident_bytes == alone.resident_bytes


def test_experts_of_one_copy_stay_in_int4_and_are_run_by_marlin():
    """vLLM prefers Machete on Hopper, which packs weights in another way and has no kernel for experts."""
    expert = Linear(64, 16, 600, "w4a16", experts=4, active_experts=2)
    (one_copy,) = ONE_COPY.values()
    (w4a8,) = load_policy("single-copy").derived.values()
    assert expert.derived(one_copy) == expert.derived(w4a8) == expert
    single = replace(expert, experts=1, active_experts=1)
    assert (single.derived(one_copy).scheme, single.derived(w4a8).scheme) == ("w8a8", W4A8_INT8)
    assert replace(expert, scheme="bf16", experts=1).derived(one_copy).scheme == "bf16"
    h100 = load_device("h100")
    assert h100.kernel(MARLIN) != h100.kernel("w4a16")
    assert load_device("l20").kernel(MARLIN) == load_device("l20").kernel("w4a16")
    assert linear_seconds(expert, 512, h100) == linear_seconds(replace(expert, scheme=MARLIN), 512, h100)


SPLITS = {"RowParallelLinear": ROW_PARALLEL, "QKVParallelLinear": QKV}
SPLITS |= dict.fromkeys(("ReplicatedLinear", "GateLinear"), REPLICATED)
OUTSIDE_OF_LAYERS = {"project_in", "project_out", "v_head"}
OF_OTHER_NAMES = {"layer", "classifier", "proj", "wq_b", "linear", "modality_router", "v_router", "qkv_proj"}
"""Linears that transformers names otherwise, or that only models without a prediction have whole."""


def names_in_vllm() -> dict[str, set[str]]:
    """Return the class of a linear in vLLM -> the attributes that hold one in its text models."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model_executor"
    files = [folder / "models" / f"{module}.py" for module, _ in _TEXT_GENERATION_MODELS.values()]
    found = defaultdict(set)
    for file in {*files, *(folder / "layers" / "mamba").glob("*.py")}:
        for node in ast.walk(ast.parse(file.read_text() if file.is_file() else "")):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made, target = node.value.func, node.targets[0]
                if isinstance(made, ast.Name) and isinstance(target, ast.Attribute):
                    found[made.id].add(target.attr)
    return found


def test_the_names_are_those_of_vllms_models():
    in_vllm = names_in_vllm()
    assert {"o_proj", "down_proj", "out_proj"} <= in_vllm["RowParallelLinear"]
    for its_class, names in SPLITS.items():
        assert in_vllm[its_class] - names <= OUTSIDE_OF_LAYERS | OF_OTHER_NAMES, its_class
    by_outputs = in_vllm["ColumnParallelLinear"] | in_vllm["MergedColumnParallelLinear"]
    assert "gate_up_proj" in by_outputs and not by_outputs & (ROW_PARALLEL | REPLICATED)


LINEAR = Linear(96, 40, 4000, "w8a8")


@pytest.mark.parametrize(
    ("name", "outputs", "inputs"),
    [("mlp.gate_up_proj", 24, 40), ("mlp.down_proj", 96, 10), ("mlp.experts.down_proj", 96, 10)]
    + [("o_proj", 96, 10), ("mlp.gate", 96, 40)],
)
def test_a_part(name, outputs, inputs):
    part = Linear(outputs, inputs, 4000 * outputs * inputs // (96 * 40), "w8a8")
    assert LINEAR.share(f"layers.0.{name}", 4) == part and LINEAR.share(name, 1) == LINEAR


@pytest.mark.parametrize(("name", "what"), [("a.o_proj", "40 inputs"), ("a.up_proj", "96 outputs")])
def test_what_ranks_cannot_share_is_refused(name, what):
    with refused(f"the {what} of '{name}' cannot be shared evenly by 7 devices; give"):
        LINEAR.share(name, 7)
