# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Recipes for models with states: gates stay in 16 bit, norms are folded into all that read them; why."""

from typing import Any

import pytest
import yaml

from flexquant.errors import FlexQuantError
from flexquant.quantization import vocabulary
from flexquant.quantization.recipe import SCHEMA, parse_recipe
from flexquant.quantization.resolve import ResolvedVariant, in_layer, resolve_variant
from flexquant.quantization.source_model import default_mappings, empty_model, resolve_mappings
from flexquant.quantization.vocabulary import SHARED_CACHE, check_mapping, check_targets
from tests.architectures.models import small_config

PLAIN = {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A8"}
W8A8: dict[str, Any] = {"QuantizationModifier": PLAIN}
STATES = {
    "qwen3_next": ("linear_attn.in_proj_qkvz linear_attn.out_proj", "linear_attn.in_proj_ba"),
    "qwen3_5_text": (
        "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.out_proj",
        "linear_attn.in_proj_b linear_attn.in_proj_a",
    ),
    **dict.fromkeys(("falcon_h1", "granitemoehybrid", "bamba"), ("mamba.in_proj mamba.out_proj", "")),
    "nemotron_h": ("mixer.in_proj mixer.out_proj", ""),
    "lfm2": ("conv.in_proj conv.out_proj", ""),
    "jamba": ("", "mamba.in_proj mamba.x_proj mamba.dt_proj mamba.out_proj"),
}
"""Model type -> linears around the state of the first layer that are quantised, and those that are not."""


def resolve(kind: str, section: dict[str, Any]) -> ResolvedVariant:
    config = small_config(kind)
    document = yaml.safe_dump({"schema": SCHEMA, "variants": {"v": section}}, sort_keys=False)
    recipe = parse_recipe(document.encode(), "test.yaml", "test").variants["v"]
    return resolve_variant(recipe, empty_model(config), kind)


@pytest.mark.parametrize("kind", STATES)
def test_gates_of_states_stay_in_16_bit_and_large_projections_do_not(kind):
    resolved = resolve(kind, W8A8)
    quantised, left = (names.split() for names in STATES[kind])
    layers = {in_layer(name) for name in resolved.linears if ".layers.0." in name}
    assert layers >= {*quantised} and not layers & {*left}
    ignored = resolved.recipe.modifiers["QuantizationModifier"]["ignore"]
    assert ignored[0] == "lm_head" and len(ignored) >= 1 + len(left)
    assert all(any(name.replace(".", "\\.") in one for one in ignored) for name in left)
    assert ("left in 16 bit" in " ".join(resolved.notes)) is (len(ignored) > 1)


def test_what_kimis_linear_attention_computes_at_once_stays_in_16_bit_together():
    ignore = ["lm_head", "re:.*kv_b_proj$"]
    resolved = resolve("kimi_linear", {"QuantizationModifier": {**PLAIN, "ignore": ignore}})
    assert "model.layers.0.self_attn.o_proj" in resolved.linears
    assert not {f"model.layers.0.self_attn.{p}_proj" for p in "qkvb"} & set(resolved.linears)
    latent = [name for name in resolved.linears if name.startswith("model.layers.3.self_attn.")]
    assert any("q_" in name for name in latent), "layers of latent attention are quantised"


def test_a_recipe_that_names_gates_quantises_them():
    named = {**PLAIN, "targets": ["Linear", r"re:.*in_proj_ba$"]}
    resolved = resolve("qwen3_next", {"QuantizationModifier": named})
    assert "model.layers.0.linear_attn.in_proj_ba" in resolved.linears
    assert "model.layers.0.mlp.shared_expert_gate" not in resolved.linears


def test_models_without_states_are_quantised_as_before():
    resolved = resolve("llama", W8A8)
    assert resolved.recipe.modifiers["QuantizationModifier"]["ignore"] == ["lm_head"] and not resolved.notes


@pytest.mark.parametrize(
    ("kind", "norm", "readers"),
    [
        ("qwen3_next", "input_layernorm", "in_proj_qkvz in_proj_ba"),
        ("qwen3_5_text", "input_layernorm", "in_proj_qkv in_proj_z in_proj_b in_proj_a"),
        ("falcon_h1", "input_layernorm", "in_proj q_proj k_proj v_proj"),
        *((kind, "input_layernorm", "in_proj") for kind in ("granitemoehybrid", "bamba", "jamba")),
        ("nemotron_h", "norm", "in_proj"),
        ("lfm2", "operator_norm", "in_proj"),
    ],
)
def test_scales_move_from_the_first_norm_into_all_that_reads_it(kind, norm, readers):
    model = empty_model(small_config(kind))
    names = [name for name, _ in model.named_modules()]
    found = resolve_mappings(default_mappings(kind, "norms", names), model, kind)
    (first,) = (linears for front, linears in found.items() if front.endswith(f".layers.0.{norm}"))
    assert {name.rpartition(".")[2] for name in first} == {*readers.split()}
    of_attention = [linears for linears in found.values() if any("q_proj" in name for name in linears)]
    assert of_attention and all(len(linears) >= 3 for linears in of_attention)


def test_a_mapping_that_omits_the_gates_is_refused():
    mapping = [[r"re:.*layers\.0\.linear_attn\.in_proj_qkvz$"], r"re:.*layers\.0\.input_layernorm$"]
    front = {"smoothing_strength": 0.5, "mappings": [mapping]}
    with pytest.raises(FlexQuantError, match="it has to cover exactly .*in_proj_ba"):
        resolve("qwen3_next", {"SmoothQuantModifier": front, **W8A8})


CHANGE_THE_STATE = [f"in_proj{end}" for end in ("", "_qkvz", "_qkv", "_ba", "_a", "_b")]
CHANGE_THE_STATE += ["x_proj", "dt_proj", "conv1d", "conv"]
CHANGE_THE_CACHE = ["v_proj", "k_proj", "q_proj", "qkv_proj", "k_norm", "q_norm", *CHANGE_THE_STATE]
CHANGE_THE_MODEL = ["o_proj", "gate_proj", "down_proj", "out_proj", "in_proj_z"]


@pytest.mark.parametrize("name", CHANGE_THE_CACHE + CHANGE_THE_MODEL)
def test_the_reason_names_the_shared_cache_only_where_k_or_v_change(name):
    reason = check_mapping([r"re:.*self_attn\.o_proj$"], rf"re:.*\.{name}$")
    assert reason is not None and name in reason
    assert (SHARED_CACHE in reason) == (name in CHANGE_THE_CACHE)


def test_every_refused_module_is_covered_here():
    refused = {name.rpartition(".")[2] for name in (*vocabulary._CACHED, *vocabulary._UNBALANCED)}
    assert refused == {*CHANGE_THE_CACHE, *CHANGE_THE_MODEL}


@pytest.mark.parametrize("target", ["Conv1d", r"re:.*linear_attn\.conv1d$", "model.layers.3.conv.conv"])
def test_convolutions_that_write_a_state_are_no_targets(target):
    assert SHARED_CACHE in (check_targets(["Linear", target]) or "")
    assert check_targets(["Linear", r"re:.*linear_attn\.in_proj_qkvz$"]) is None
