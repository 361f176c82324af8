# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every architecture that is served, and what is more than a dense text model: experts, states, images.

An architecture is built to the end, or refused before anything is quantised. Every expert is quantised by
itself, and routers stay in 16 bit. What expands the cached latent does too, and the gates of a state. Vision
models are quantised with llm-compressor itself, as the page shows.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from flexquant import cli
from flexquant.build import build_checkpoint
from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_config import MergedConfig, read_merged_config
from flexquant.checkpoint.module_names import EXPERTS
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, verify_checkpoint
from flexquant.quantization.oneshot import separate_experts
from flexquant.quantization.recipe import Recipe, load_recipe
from flexquant.quantization.resolve import ResolvedVariant, quantization_groups, resolve_variant
from flexquant.quantization.source_model import empty_model
from tests.architectures.models import LIKE, random_model, small_config, split
from tests.architectures.outcomes import RESULTS, SERVED
from tests.checkpoints import MIXTURES, base_config, make_checkpoint, saved_tensors, write_checkpoint
from tests.conftest import rest_full
from tests.quantize.quantizing import OPTIONS, RTN, quantize, recipe, recorder, section
from tests.readme import blocks
from tests.vision import KINDS, make_vision_checkpoint

VARIANTS = ("w8a8", "w4a16")
ROUTER = {"mixtral": "block_sparse_moe.gate", "qwen2_moe": "mlp.gate", "qwen3_moe": "mlp.gate"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {name: make_checkpoint(folder / name, name, scheme=None, num_layers=1) for name in MIXTURES}


def merged(folder: Path) -> MergedConfig:
    """Merge the variants in a folder, and return what the merged config says."""
    merge_checkpoints({name: folder / name for name in VARIANTS}, folder / "merged")
    return read_merged_config(folder / "merged")[0]


# Qwen3's mixture differs from Qwen2's by its lack of shared experts alone, so the full run has it.
@pytest.mark.parametrize("architecture", rest_full(MIXTURES, "mixtral", "qwen2_moe"))
def test_experts_are_quantised_under_their_published_names(architecture, models, tmp_path):
    quantize(models[architecture], tmp_path)
    linears = {name for name in read_tensors(models[architecture]) if EXPERTS.match(name)}
    for variant, ends in (("w8a8", ("", "_scale")), ("w4a16", ("_packed", "_scale", "_shape"))):
        tensors = read_tensors(tmp_path / variant)
        assert {name for name in tensors if EXPERTS.match(name)} == {n + end for n in linears for end in ends}
        router = f"model.layers.0.{ROUTER[architecture]}"
        assert tensors[f"{router}.weight"].dtype == "BF16"
        assert LinearSchemes(section(tmp_path / variant), variant, []).of(router) is None
    assert not any("experts" in name for name in merged(tmp_path).shared_modules)


def test_experts_in_16_bit_are_stored_once(models, tmp_path):
    quantize(models["qwen3_moe"], tmp_path, "experts-in-16-bit")
    for variant in VARIANTS:
        experts = [name for name in read_tensors(tmp_path / variant) if EXPERTS.match(name)]
        assert {name.rpartition(".")[2] for name in experts} == {"weight"}
    assert "model.layers.0.mlp.experts" in merged(tmp_path).shared_modules


@pytest.mark.parametrize(("architecture", "rotated"), [("qwen2_moe", True), ("qwen3_moe", False)])
def test_of_a_mixture_no_more_than_the_shared_expert_is_rotated(architecture: str, rotated: bool) -> None:
    config = base_config(architecture)
    model = separate_experts(empty_model(config))
    for name in ("default", "experts-in-16-bit"):
        found = resolve_variant(load_recipe(name).variants["w8a8"], model, config.model_type)
        assert ("QuIPModifier" in found.recipe.modifiers) is rotated
        left_out = "without QuIPModifier, which ignores all its targets in this model"
        assert (left_out in found.notes) is not rotated


def test_experts_are_neither_rotated_nor_given_zero_points() -> None:
    """vLLM has neither for experts, and reads no zero points for them from a config."""
    config = base_config("qwen3_moe")
    model = separate_experts(empty_model(config))

    def resolved(by: Recipe) -> ResolvedVariant:
        return resolve_variant(by.variants["w8a8"], model, config.model_type)

    found = resolved(load_recipe("default"))
    experts, others = quantization_groups(found.recipe.modifiers["GPTQModifier"]).values()
    assert (experts.targets, experts.input_activations.symmetric) == (["re:.*\\.experts\\..*"], True)
    assert (others.targets, others.input_activations.symmetric) == (["Linear"], False)
    arguments = {"ignore": ["lm_head"], "scheme": "W8A8", "asymmetric_activations": True}
    of_attention = {"GPTQModifier": {**arguments, "targets": ["re:.*self_attn.*_proj$"]}}
    alone = resolved(recipe(w8a8=of_attention)).recipe.modifiers["GPTQModifier"]
    assert len(quantization_groups(alone)) == 1
    of_some = {"GPTQModifier": {**arguments, "targets": ["re:.*\\.down_proj$"]}}
    with pytest.raises(FlexQuantError, match=r"cannot leave out experts where re:\.\*.* names them"):
        resolved(recipe(w8a8=of_some))
    rotation = {"targets": ["re:.*down_proj$"], "transform_block_size": 32}
    said = r"rotate the inputs of .*\.experts\.0\.down_proj, which vLLM does"
    with pytest.raises(FlexQuantError, match=said):
        resolved(recipe(w8a8={"QuIPModifier": rotation, "GPTQModifier": arguments}))


@pytest.mark.parametrize(("of_down", "problem"), [(64, None), (96, "down_proj has 256 input features")])
def test_groups_of_several_sizes_divide_their_own_linears(of_down: int, problem: str | None) -> None:
    config = base_config("llama")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    groups = {
        name: {"targets": [target], "weights": {**weights, "group_size": size}}
        for name, target, size in (("a", r"re:.*\.q_proj$", 32), ("b", r"re:.*\.down_proj$", of_down))
    }
    by = recipe(v={"QuantizationModifier": {"config_groups": groups, "ignore": ["lm_head"]}})
    model = empty_model(config)
    with nullcontext() if problem is None else pytest.raises(FlexQuantError, match=problem):
        assert resolve_variant(by.variants["v"], model, config.model_type).group_size is None


ATTENTION = "model.layers.0.self_attn"


def test_what_expands_a_latent_stays_in_16_bit(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "deepseek_v2", scheme=None, num_layers=1)
    with pytest.raises(FlexQuantError, match=r"kv_b_proj would be quantised; add 're:\.\*kv_b_proj\$'"):
        quantize(model, tmp_path / "variants", recipe(v=RTN))
    assert not (tmp_path / "variants").exists()
    quantize(model, tmp_path)
    for name, end in (("w8a8", "weight"), ("w4a16", "weight_packed")):
        tensors = read_tensors(tmp_path / name)
        assert tensors[f"{ATTENTION}.kv_b_proj.weight"].dtype == "BF16"
        assert tensors[f"{ATTENTION}.kv_a_proj_with_mqa.{end}"].dtype != "BF16"
    merged(tmp_path)


STATE = "model.layers.0.linear_attn"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    kinds = ["linear_attention", "full_attention"]
    model = random_model(small_config("qwen3_next", num_hidden_layers=2, layer_types=kinds))
    model.config.architectures = ["Qwen3NextForCausalLM"]
    write_checkpoint(folder / "model", model.config, split(model)[0], None, set(), [])
    assert cli.main(["build", str(folder / "model"), "--output", str(folder / "merged"), *OPTIONS]) == 0
    return folder


def test_variants_that_share_a_state_are_built_and_merged(built: Path) -> None:
    variants = {name: built / "merged-variants" / name for name in VARIANTS}
    assert set(verify_checkpoint(built / "merged", variants)["tensors_compared_with"]) == set(variants)
    for name, end in (("w8a8", "weight"), ("w4a16", "weight_packed")):
        tensors = read_tensors(variants[name])
        assert tensors[f"{STATE}.in_proj_qkvz.{end}"].dtype != "BF16"
        assert tensors[f"{STATE}.out_proj.{end}"].dtype != "BF16"
        for left in ("in_proj_ba.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight"):
            assert tensors[f"{STATE}.{left}"].dtype == "BF16"
        schemes = LinearSchemes(section(variants[name]), name, [])
        assert schemes.of(f"{STATE}.in_proj_ba") is None and schemes.of(f"{STATE}.in_proj_qkvz") is not None
        assert schemes.of("model.layers.0.mlp.shared_expert_gate") is None


def test_the_recipe_tells_what_was_left_in_16_bit_and_how_the_norm_was_folded(built: Path) -> None:
    recipe = yaml.safe_load((built / "merged-variants" / "w8a8" / "recipe.yaml").read_text())
    (variant,) = recipe["variants"].values()
    assert r"re:.*\.linear_attn\.in_proj_ba$" in variant["GPTQModifier"]["ignore"]
    strengths = variant["SmoothQuantModifier"]["smoothing_strength"]
    assert strengths.keys() == {f"model.layers.{layer}.input_layernorm" for layer in range(2)}
    mappings = variant["SmoothQuantModifier"]["mappings"]
    assert [[f"{STATE}.in_proj_qkvz", f"{STATE}.in_proj_ba"], "model.layers.0.input_layernorm"] in mappings


# The full run finds what a release of transformers changes in the other kinds.
@pytest.mark.parametrize("name", rest_full(KINDS, "idefics3", "qwen3_5"))
def test_what_the_page_shows_gives_variants_that_merge(name, tmp_path, monkeypatch):
    (code,) = [block for block in blocks("python") if "my-vision-model" in block]
    kind, of_the_page = KINDS[name], repr(list(KINDS["idefics3"].towers))[1:-1].replace("'", '"')
    assert of_the_page in code
    make_vision_checkpoint(tmp_path / "my-vision-model", None, kind)
    monkeypatch.chdir(tmp_path)
    exec(code.replace(of_the_page, repr([*kind.towers, *kind.in_16_bit])[1:-1]), {})
    found = merged(tmp_path / "my-vision-variants")
    towers = {tower.removeprefix("re:.*").removesuffix(".*") for tower in kind.towers}
    assert towers <= {module.rpartition(".")[2] for module in found.shared_modules}
    assert found.layered_plans
    keys = read_tensors(tmp_path / "my-vision-variants" / "merged")
    parts = [key for key in keys if "layers.3.self_attn.q_proj.weight_" in key]
    ends = {(key.split(".")[0], key.rpartition("_")[2]) for key in parts}
    assert ends >= {("w8a8", "scale"), ("w4a16", "packed")}


def test_recipes_refuse_a_vision_model_and_say_what_to_do(tmp_path: Path) -> None:
    model = make_vision_checkpoint(tmp_path / "model", scheme=None)
    with pytest.raises(FlexQuantError, match=r"\('idefics3'\).*with llm-compressor itself.*Vision models"):
        quantize(model, tmp_path / "variants")
    assert not (tmp_path / "variants").exists()


FOUND = json.loads(RESULTS.read_text())["architectures"]
SOME = [f"{name}ForCausalLM" for name in ("Afmoe", "Falcon", "GPTNeoX", "GptOss", "MiMo", "OPT")]
"""A router in 16 bit, another class of linears, a renamed head, fused experts, and two that are refused."""
WITHOUT_CLASS = "IQuestCoder InternLM3 MiMo MiMoV2 MiniCPM PanguEmbedded Solar TeleChat3 TeleFLM"
UNKNOWN = "names the architecture {}, and transformers computes the model_type '{}' as"
REFUSED = {"OPTForCausalLM": "transformers cannot build the OPTForCausalLM"} | {
    name: UNKNOWN.format(name, FOUND[name]["model_type"])
    for name in map("{}ForCausalLM".format, WITHOUT_CLASS.split())
}
"""Architecture -> how it is refused; transformers has no class for the others."""
BUILT = sorted(name for name in FOUND if FOUND[name]["outcome"] == SERVED or name in REFUSED)


def write_model(folder: Path, architecture: str) -> Path:
    """Write a small random 16-bit model of an architecture, and return its folder."""
    own = LIKE.get(architecture, ("", {}))[1]
    model = random_model(small_config(FOUND[architecture]["model_type"], **own))
    tensors = saved_tensors(model)
    model.config.architectures = [architecture]
    return write_checkpoint(folder, model.config, tensors, None, set(), [])


@pytest.mark.parametrize("architecture", rest_full(BUILT, *SOME))
def test_it_is_built_to_the_end_or_refused_before_quantising(architecture: str, tmp_path: Path) -> None:
    model, titles = write_model(tmp_path / "model", architecture), list[str]()

    def build() -> list[str]:
        built = build_checkpoint(model, tmp_path / "merged", load_recipe("rtn"), stage=recorder(titles))
        assert all(variant.losses for variant in built.variants)
        return [variant.folder for variant in built.variants]

    if architecture in REFUSED:
        with pytest.raises(FlexQuantError, match=REFUSED[architecture]):
            build()
        assert titles == [f"reading {model}"]
        assert not (tmp_path / "merged-variants").exists()
        return
    for folder in build():
        tensors = read_tensors(Path(folder))
        weights = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
        assert weights
        for name in weights:
            assert f"{name}_packed" in tensors or tensors[name].dtype == "I8"
    assert read_merged_config(tmp_path / "merged")[0].base_architecture == architecture
