# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Recipes are read, refused with line and reason, and fitted to a model, all without llmcompressor."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PretrainedConfig

from flexquant.documents.yaml_document import builtin_names, to_yaml
from flexquant.errors import FlexQuantError
from flexquant.quantization import recipe as recipes
from flexquant.quantization.recipe import PACKAGE, SCHEMA, load_recipe, parse_recipe
from flexquant.quantization.resolve import choose_group_size, resolve_variant, with_strengths
from flexquant.quantization.source_model import default_mappings, empty_model, resolve_mappings
from tests.architectures.models import small_config
from tests.checkpoints import base_config

W8A8 = {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A8"}}
W4A16 = {"GPTQModifier": {"ignore": ["lm_head"], "scheme": "W4A16", "group_size": [128, 64, 32]}}


def parse(variants: Any, **more: Any) -> recipes.Recipe:
    document = {"schema": SCHEMA, "variants": variants, **more}
    return parse_recipe(yaml.safe_dump(document, sort_keys=False).encode(), "my.yaml", "my")


NAMED = ("default", "unrotated", "fp8", "awq", "plain", "rtn")
"""Recipes that pages and commands name."""


def resolve(section: dict[str, Any], architecture: str = "llama", **config: Any) -> Any:
    settings = base_config(architecture, **config)
    return resolve_variant(parse({"v": section}).variants["v"], empty_model(settings), settings.model_type)


@pytest.mark.parametrize("name", sorted({*builtin_names(PACKAGE), *NAMED}))
def test_every_shipped_recipe_fits_a_model(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description and "w4a16" in recipe.variants
    for architecture in ("llama", "qwen2", "qwen3", "gemma3"):
        config = base_config(architecture)
        for variant in recipe.variants.values():
            resolved = resolve_variant(variant, empty_model(config), config.model_type)
            assert len(resolved.linears) == 14 and not resolved.notes
    assert load_recipe(name).variants == recipe.variants


def test_a_file_is_read_back_as_written(tmp_path: Path) -> None:
    document: dict[str, Any] = {"schema": SCHEMA, "description": "mine", "policy": "phase"}
    document["calibration"] = {"data": "chats.jsonl", "samples": 4}
    document["variants"] = {"int4": {**W4A16, "scale_distillation": {"epochs": 2}}}
    document["variants"]["w8a8"] = {**W8A8, "nested_in": "int4"}
    document["made_with"] = {"anything": [1, 2]}
    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(document))
    recipe = load_recipe(file)
    assert (recipe.name, recipe.description, recipe.policy) == (str(file), "mine", "phase")
    assert recipe.calibration == recipes.Calibration(data="chats.jsonl", samples=4)
    assert {name: v.to_json() for name, v in recipe.variants.items()} == document["variants"]
    assert recipe.variants["int4"].scale_distillation == recipes.ScaleDistillation(epochs=2)
    in_int8 = recipe.with_head("int8")
    assert in_int8.with_head(None) == in_int8 != in_int8.with_head("stored") == recipe


def calibrated(settings: str) -> str:
    """Return a recipe's text with these calibration settings."""
    variant = "a: {QuantizationModifier: {scheme: W8A8}}"
    return f"schema: {SCHEMA}\nvariants: {{{variant}}}\ncalibration: {{{settings}}}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", r"my.yaml, line 1: the recipe is empty; write the keys 'schema' and 'variants'"),
        ("# nothing\n---\n", r"is empty"),
        ("schema: [", r"my.yaml, line 1: not valid YAML"),
        ("- a", r"line 1: the recipe is \[\"a\"\]; give a mapping with the keys schema, variants"),
        ("variants: {}", r"lacks the key 'schema'"),
        ("schema: flexquant.recipe/v2\nvariants: {a: {}}", r"line 1: schema is .* reads 'flexquant"),
        (f"schema: {SCHEMA}\nvariants: {{}}", r"line 2: variants is \{\}; give a mapping"),
        (f"schema: {SCHEMA}\nvariant: {{}}", r"line 2: variant is an unknown key; .* schema, variants, desc"),
        (f"schema: {SCHEMA}\nvariants:\n  a/b: {{}}", r"line 3: variants.a/b is wrong"),
        (f"schema: {SCHEMA}\nvariants:\n  a: {{}}\n  a: {{}}", r"line 4: variants.a was given in line 3"),
        (calibrated("data: 3"), r"calibration.data is 3; give a file, a folder, a dataset id, self or null"),
        (calibrated("samples: 0"), r"calibration.samples is 0; give a whole number of at least 1"),
        (calibrated("length: 1"), r"calibration.length is 1; give a whole number of at least 2"),
        (calibrated("sample: 3"), r"calibration.sample is an unknown key; .* data, samples, length, seed"),
    ],
)  # fmt: skip
def test_bad_documents(content: str, expected: str) -> None:
    with pytest.raises(FlexQuantError, match=expected):
        parse_recipe(content.encode(), "my.yaml", "my")


def with_argument(**arguments: Any) -> dict[str, Any]:
    return {"GPTQModifier": {**W8A8["GPTQModifier"], **arguments}}


def rotating(target: str, size: int, **arguments: Any) -> dict[str, Any]:
    return {"QuIPModifier": {"targets": [target], "transform_block_size": size, **arguments}, **W8A8}


def with_front(modifier: str, **arguments: Any) -> dict[str, Any]:
    return {modifier: arguments, **W8A8}


ROUNDED = {"QuantizationModifier": {"scheme": "W8A8"}}
CANNOT_BE_NESTED = (ROUNDED, with_argument(first_token_weight=10), rotating("x", 64))
NOT_NESTED = r"line 3: variants.v has nested_in, which takes another .* first_token_weight, and no QuIPMod"
QKV = ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]
UNSAFE_MAPPINGS = [
    ([["re:.*o_proj$"], "re:.*v_proj$"], "smoothing v_proj scales V"),
    ({"smooth_layer": "re:.*self_attn.v_proj", "balance_layers": ["re:.*o_proj"]}, "scales V"),
    ([["model.layers.3.self_attn.o_proj"], "model.layers.3.self_attn.v_proj"], "scales V"),
    ([QKV, "re:.*"], "scales V"),
    ([["re:.*q_proj$"], "re:.*k_proj$"], "scales K"),
    ([["re:.*q_proj$"], "re:.*k_norm$"], "scales K"),
    ([["re:.*o_proj$"], "re:.*qkv_proj$"], "scales Q, K and V"),
    ([["re:.*down_proj$"], "re:.*gate_proj$"], "is not linear"),
    ([["re:.*o_proj$"], "re:.*up_proj$"], "give .* the one linear down_proj"),
    ([["re:.*down_proj$", "re:.*o_proj$"], "re:.*up_proj$"], "give .* the one linear down_proj"),
    ([["re:.*down_proj$"], "re:.*input_layernorm$"], "smooth down_proj behind up_proj"),
]
WHAT_CHANGES_THE_CACHE = [
    *((with_front("AWQModifier", mappings=[mapping]), expected) for mapping, expected in UNSAFE_MAPPINGS),
    *(
        (with_front("SmoothQuantModifier", mappings=[mapping], smoothing_strength=0.5), expected)
        for mapping, expected in UNSAFE_MAPPINGS
    ),
    ({"SpinQuantModifier": {}, **W8A8}, r"SpinQuantModifier is refused: it rotates heads .*one cache"),
    ({"TransformModifier": {}, **W8A8}, r"TransformModifier is refused: it .*; QuIPModifier rotates inputs"),
    (with_argument(kv_cache_scheme={"num_bits": 8}), r"kv_cache_scheme is refused: .* KV cache"),
    (with_argument(targets=["Embedding"]), r"remove 'Embedding': embeddings stay in 16 bit"),
    (with_argument(targets=["re:.*"]), r"embeddings stay in 16 bit"),
    (with_argument(targets=["LlamaAttention"]), r"quantised attention"),
    (with_argument(scheme={"W8A8": ["re:.*embed.*"]}), r"embeddings stay in 16 bit"),
    (
        {"GPTQModifier": {"config_groups": {"a": {"targets": ["Linear"], "output_activations": {}}}}},
        r"remove output_activations from a",
    ),
]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, r"line 3: variants.v has the modifiers none; give exactly one of GPTQModifier, Quantization"),
        ({**W8A8, "QuantizationModifier": {"scheme": "W8A8"}}, r"exactly one of .*, as the last one"),
        ({**W8A8, "AWQModifier": {}}, r"has the modifiers GPTQModifier, AWQModifier; .* as the last one"),
        ({"SparseGPTModifier": {}, **W8A8}, r"SparseGPTModifier is an unknown key; .* AWQModifier, QuIP"),
        ({**W8A8, "nested_in": 4}, r"line \d+: variants.v.nested_in is 4; give the name of a variant"),
        *(({**alone, "nested_in": "w"}, NOT_NESTED) for alone in CANNOT_BE_NESTED),
        ({**W8A8, "nested_in": "v"}, NOT_NESTED),
        (with_argument(dampening=1), r"line \d+: .*dampening is an unknown key; .* dampening_frac, actorder"),
        (with_argument(dampening_frac="x"), r'dampening_frac is "x"; give a number from 0 to 1'),
        (with_argument(actorder="group"), r"give one of static, weight, null"),
        (with_argument(block_size=0), r"block_size is 0; give a whole number of at least 1"),
        (with_argument(group_size=[]), r"group_size is \[\]; give a number of input features, or a list"),
        (with_argument(group_size=[128, 0]), r"group_size is .128, 0.; give a number of input"),
        (with_argument(observer={"input": "x"}, input_observer="x"), r"given beside weight_observer or"),
        (
            rotating("x", 64, transform_type="matrix"),
            r"transform_type is \"matrix\"; give one of hadamard, random-hadamard",
        ),
        (rotating("x", 64, where_possible="yes"), r"where_possible is \"yes\"; give true or false"),
        (with_argument(targets=["re:*q_proj"]), r"correct 're:\*q_proj', which is no regular expression"),
        (with_argument(ignore=["re:*lm_head"]), r"correct 're:\*lm_head', which is no regular expression"),
        (with_argument(observer="mse"), r"observer is \"mse\"; .*use weight_observer"),
        (with_argument(targets="Linear"), r"targets is \"Linear\"; give a list"),
        (with_argument(config_groups={"a": {"targets": ["Linear"]}}), r"needs either 'scheme', .* give one"),
        ({"GPTQModifier": {"config_groups": {"a": 1}}}, r"config_groups is .*; give a mapping"),
        (with_front("SmoothQuantModifier"), r"lacks the key 'smoothing_strength'"),
        (with_front("SmoothQuantModifier", smoothing_strength=[]), r"is \[\]; give a number from 0 to 1"),
        (with_front("SmoothQuantModifier", smoothing_strength=[2]), r"is \[2\]; give a number from 0 to 1"),
        (with_front("SmoothQuantModifier", smoothing_strength=0.5, mappings="all"), r"norms, norms-and-up"),
        (with_front("AWQModifier", mappings=[["re:.*q_proj$"]]), r"every mapping as \[\[linear"),
        (with_front("AWQModifier", n_grid=1), r"whole number of at least 4"),
        ({**W8A8, "scale_distillation": {}}, r"scale_distillation lacks the key 'epochs'"),
        ({**W8A8, "scale_distillation": {"epochs": 0}}, r"epochs is 0; give a whole number of at least 1"),
        *WHAT_CHANGES_THE_CACHE,
    ],
)  # fmt: skip
def test_bad_sections_are_named_with_line_and_reason_or_what_is_allowed(section: dict, expected: str) -> None:
    with pytest.raises(FlexQuantError, match=expected):
        parse({"v": section})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nonsense", r"unknown recipe 'nonsense': the built-in ones are awq, default"),
        ("no/such.yaml", r"the recipe file cannot be read \(No such file"),
    ],
)
def test_unknown_recipes(name: str, expected: str) -> None:
    with pytest.raises(FlexQuantError, match=expected):
        load_recipe(name)


@pytest.mark.parametrize(
    ("features", "size"), [((128, 256), 128), ((576, 1536), 64), ((576, 96), 32), ((896, 4864), 128)]
)
def test_the_first_group_size_that_divides_all(features: tuple[int, ...], size: int) -> None:
    assert choose_group_size({f"layer{i}": k for i, k in enumerate(features)}, [128, 64, 32]) == size


def from_the_norm(linear: str) -> dict[str, Any]:
    return with_front("AWQModifier", mappings=[[[f"re:.*{linear}$"], "re:.*input_layernorm$"]])


def smoothing(module: str, **arguments: Any) -> dict[str, Any]:
    return with_front("SmoothQuantModifier", smoothing_strength={module: 0.5}, **arguments)


WITH_ZERO_POINTS = {"GPTQModifier": {**W4A16["GPTQModifier"], "asymmetric_activations": True}}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"QuantizationModifier": {"scheme": "W8A8"}}, r"my.yaml, line 3: variants.v: lm_head would be"),
        (with_argument(scheme="W3A3"), r"'W3A3' is no scheme of compressed-tensors; choose among .*W8A8"),
        (with_argument(targets=["re:.*x_proj$"]), r"no linear of the model matches re:\.\*x_proj\$"),
        (with_argument(group_size=64), r"group_size is given, but the scheme has no groups"),
        ({**W8A8, "scale_distillation": {"epochs": 1}}, r"16-bit activations, and .*_proj is quantised"),
        (from_the_norm("q_proj"), r"covers .*q_proj; it has to cover exactly .*k_proj, .*q_proj, .*v_proj"),
        (from_the_norm("x_proj"), r"the mapping from 're:\.\*input_layernorm\$' does not fit this model"),
        (smoothing("model.norm"), r"names 'model.norm', which no mapping smooths"),
        (smoothing("model.layers.0.input_layernorm", mappings="norms"), r"lacks 'model.layers.1.input_lay"),
        (W4A16, r"mlp\.down_proj has 200 input features.*128, 64, 32 divides"),
        (WITH_ZERO_POINTS, r"a zero point .* those for Linear are not in INT8 by token; remove it"),
        (rotating("re:.*down_proj$", 64), r"cannot rotate the 200 inputs of .*down_proj in blocks of 64"),
        (
            rotating("re:.*down_proj$", 40, transform_type="hadamard"),
            r"in blocks of 40; give a transform_block_size .* a power of two",
        ),
        (rotating("re:.*x_proj$", 64), r"QuIPModifier matches no linear"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(FlexQuantError, match=expected):
        resolve(section, intermediate_size=200)


@pytest.mark.parametrize(
    ("target", "architecture", "found"),
    [
        ("re:.*kv_b_proj$", "deepseek_v2", "kv_b_proj, which vLLM does not"),
        ("re:.*[qkv]_proj$", "qwen2", "[qk]_proj, which vLLM does not .* or a bias; add its name"),
        ("re:.*gate_proj$", "llama", r"gate_proj and not of model\.layers\.0\.mlp\.up_proj"),
    ],
)
def test_inputs_that_vllm_does_not_rotate_are_refused(target: str, architecture: str, found: str) -> None:
    with pytest.raises(FlexQuantError, match=f"would rotate the inputs of .*{found}"):
        resolve(rotating(target, 32), architecture)


@pytest.mark.parametrize("name", ["default", "awq", "experts-in-16-bit"])
def test_built_in_recipes_rotate_the_inputs_of_down_proj(name: str) -> None:
    settings, w8a8 = base_config(intermediate_size=192), load_recipe(name).variants["w8a8"]
    resolved = resolve_variant(w8a8, empty_model(settings), settings.model_type)
    rotation = {"targets": [r"re:.*\.down_proj$"], "ignore": [r"re:.*\.experts\..*"]}
    rotation |= {"transform_block_size": 64, "transform_type": "hadamard"}
    assert resolved.recipe.modifiers["QuIPModifier"] == rotation


def test_unrotated_is_the_default_recipe_but_for_the_rotation() -> None:
    default, unrotated = (load_recipe(name).variants for name in ("default", "unrotated"))
    modifiers = [name for name in default["w8a8"].modifiers if name != "QuIPModifier"]
    assert {name: default["w8a8"].modifiers[name] for name in modifiers} == unrotated["w8a8"].modifiers
    assert default["w4a16"] == unrotated["w4a16"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (small_config("gpt_neox"), "matches no linear of the model"),
        (base_config(mlp_bias=True), r"would rotate the inputs of .*\.0\.mlp\.down_proj, .* or a bias"),
        (base_config(intermediate_size=200), "cannot rotate the 200 inputs .* in blocks of 128 or 64 or 32"),
    ],
)
def test_a_model_that_cannot_have_the_rotation_goes_without_it_unless_it_is_asked_for(
    settings: PretrainedConfig, why: str
) -> None:
    model, by_default = empty_model(settings), load_recipe("default").variants["w8a8"]
    resolved = resolve_variant(by_default, model, settings.model_type)
    assert any(re.fullmatch(f"without QuIPModifier, which {why}", note) for note in resolved.notes)
    assert "QuIPModifier" not in resolved.recipe.modifiers and resolved.linears
    rotation = {key: v for key, v in by_default.modifiers["QuIPModifier"].items() if key != "where_possible"}
    own = parse({"v": {"QuIPModifier": rotation, **W8A8}}).variants["v"]
    with pytest.raises(FlexQuantError, match=f"my.yaml, line 3: variants.v: QuIPModifier {why}; "):
        resolve_variant(own, model, settings.model_type)


def test_what_is_rotated_is_not_smoothed_after() -> None:
    smoothing = {"SmoothQuantModifier": {"smoothing_strength": 0.5}}
    with pytest.raises(FlexQuantError, match=r"moves scales behind QuIPModifier; put it right before GPTQ"):
        parse({"v": {"QuIPModifier": rotating("re:.*down_proj$", 32)["QuIPModifier"], **smoothing, **W8A8}})


def test_the_choices_that_depend_on_the_model() -> None:
    section = {"SmoothQuantModifier": {"smoothing_strength": 0.5, "mappings": "norms"}, **W4A16}
    resolved = resolve(section, "gemma3", intermediate_size=192)
    assert resolved.group_size == resolved.recipe.modifiers["GPTQModifier"]["group_size"] == 64
    norms = [*["input_layernorm"] * 2, *["pre_feedforward_layernorm"] * 2]
    assert [name.rpartition(".")[2] for name in resolved.smoothed] == norms


def test_unknown_architectures_are_not_smoothed() -> None:
    assert default_mappings("olmo2", "norms-and-up", []) == []
    recipe = parse({"v": with_front("AWQModifier")}).variants["v"]
    resolved = resolve_variant(recipe, empty_model(base_config()), "olmo2")
    assert list(resolved.recipe.modifiers) == ["GPTQModifier"]
    assert "without AWQModifier" in resolved.notes[0]


def test_default_mappings_cover_norms_and_up_proj() -> None:
    model = empty_model(base_config(num_layers=1))
    assert resolve_mappings(default_mappings("llama", "norms-and-up", []), model, "llama") == {
        "model.layers.0.input_layernorm": [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"],
        "model.layers.0.post_attention_layernorm": [f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up")],
        "model.layers.0.mlp.up_proj": ["model.layers.0.mlp.down_proj"],
    }


def test_the_strength_of_an_ignored_mapping_is_null() -> None:
    front = with_front("SmoothQuantModifier", smoothing_strength=[0.5], mappings="norms")
    fixed = with_strengths(resolve(front, num_layers=1), {"model.layers.0.input_layernorm": 0.5})
    strengths = {"model.layers.0.input_layernorm": 0.5, "model.layers.0.post_attention_layernorm": None}
    assert fixed.modifiers["SmoothQuantModifier"]["smoothing_strength"] == strengths
