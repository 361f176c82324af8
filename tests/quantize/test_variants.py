# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What is in a variant's folder: schemes, what was smoothed, a head, files; equal inputs give equal bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flexquant import cli
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.quantization.oneshot import load_quantized
from flexquant.quantization.recipe import SCHEMA, Calibration, load_recipe
from flexquant.quantization.vocabulary import MODIFIERS
from tests import readme
from tests.checkpoints import StateDict, make_checkpoint
from tests.foreign import config_of, tensors_of
from tests.publishers import edits
from tests.quantised_heads import HEAD, with_an_unused_row
from tests.quantize import quantizing
from tests.quantize.quantizing import FEW, OPTIONS, RTN, W4A16, digests, quantize, recipe, report


def tensors(folder: Path) -> StateDict:
    return load_file(folder / "model.safetensors")


def group(folder: Path) -> dict[str, Any]:
    """Return the only group of a variant's config."""
    (found,) = quantizing.section(folder)["config_groups"].values()
    return found


def test_schemes_are_int8_per_channel_and_int4_in_groups(variants: Path) -> None:
    w8a8, w4a16 = (group(variants / name) for name in ("w8a8", "w4a16"))
    weights, activations = w8a8["weights"], w8a8["input_activations"]
    assert (weights["num_bits"], weights["strategy"], weights["symmetric"]) == (8, "channel", True)
    assert (activations["num_bits"], activations["strategy"], activations["dynamic"]) == (8, "token", True)
    assert quantizing.section(variants / "w8a8")["format"] == "int-quantized"
    weights = w4a16["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 128, True)
    assert w4a16["input_activations"] is None
    assert not any(name.endswith("g_idx") for name in tensors(variants / "w4a16"))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_everything_else_is_the_source_s(model: Path, variants: Path, scheme: str) -> None:
    assert quantizing.section(variants / scheme)["ignore"] == ["lm_head"]
    source, made = tensors(model), tensors(variants / scheme)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(made[name], source[name])
    assert {t.dtype for t in made.values() if t.is_floating_point()} == {torch.bfloat16}
    assert config_of(variants / scheme)["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (variants / scheme / name).read_bytes() == (model / name).read_bytes()
    assert sorted(p.name for p in variants.iterdir()) == ["calibration.jsonl", "w4a16", "w8a8"]
    assert all(torch.equal(made[n], source[n]) for n in source if "norm" in n) == (scheme == "w4a16")


def test_norms_hand_their_scales_to_all_their_readers_so_that_v_stays(model: Path, variants: Path) -> None:
    """A layer computes the product of the norm's weight and the linear's, which smoothing keeps."""
    source, w8a8 = tensors(model), tensors(variants / "w8a8")
    for layer in ("model.layers.0", "model.layers.1"):
        for norm, readers in {
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj",),
        }.items():
            name = f"{layer}.{norm}.weight"
            assert quantizing.relative_error(w8a8[name].float(), source[name].float()) > 0.1
            for reader in readers:
                folded = quantizing.weight(variants / "w8a8", f"{layer}.{reader}") * w8a8[name].float()
                expected = source[f"{layer}.{reader}.weight"].float() * source[name].float()
                assert quantizing.relative_error(folded, expected) < 0.03, reader
        o_proj = quantizing.weight(variants / "w8a8", f"{layer}.self_attn.o_proj")
        assert quantizing.relative_error(o_proj, source[f"{layer}.self_attn.o_proj.weight"].float()) < 0.03


IDS = torch.tensor([list(b"def quantize(model, output): ...")])


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


def test_the_quantised_model_computes_what_the_source_computes(model: Path, variants: Path) -> None:
    # Logits of unrelated models differ by about 1.4. Random weights have no outliers and few samples leave
    # GPTQ little to go by, so this tells a broken checkpoint from a sound one and says nothing on quality.
    expected = logits(model)
    with torch.no_grad():
        for name, bound in (("w8a8", 0.1), ("w4a16", 0.8)):
            assert quantizing.relative_error(load_quantized(variants / name)(IDS).logits, expected) < bound


def test_inputs_of_down_proj_are_rotated_and_activations_have_zero_points(variants: Path) -> None:
    (scheme,) = quantizing.section(variants / "w8a8")["transform_config"]["config_groups"].values()
    assert (scheme["type"], scheme["head_dim"]) == ("hadamard", 128)
    assert group(variants / "w8a8")["input_activations"]["symmetric"] is False
    made = tensors(variants / "w8a8")
    (matrix,) = {name: t for name, t in made.items() if name.endswith("_input.weight")}.values()
    assert torch.equal(matrix.float() @ matrix.float().t(), 128 * torch.eye(128))
    assert not quantizing.section(variants / "w4a16").get("transform_config")


# Mistral's layers are Llama's: the full run finds a release of transformers that changes that.
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", pytest.param("mistral", marks=pytest.mark.full)])
def test_the_default_recipe_on_other_architectures(tmp_path: Path, architecture: str) -> None:
    model = make_checkpoint(tmp_path / "model", architecture, scheme=None, num_layers=1)
    results = quantize(model, tmp_path / "variants")
    assert [(r.name, r.smoothed, r.group_size) for r in results] == [("w8a8", 3, None), ("w4a16", 0, 128)]
    merge_checkpoints([(r.name, r.folder) for r in results], tmp_path / "merged")


def test_same_inputs_give_the_same_bytes_and_so_does_the_recipe_beside_a_variant(model, variants, tmp_path):
    first = digests(variants)
    quantize(model, tmp_path / "again")
    assert digests(tmp_path / "again") == first
    for name in ("w8a8", "w4a16"):
        resolved = load_recipe(variants / name / "recipe.yaml")
        assert (resolved.calibration.samples, resolved.calibration.length) == (FEW["samples"], FEW["length"])
        quantize(model, tmp_path / name, resolved)
        again = digests(tmp_path / name)
        different = {file for file in first if file.startswith(f"{name}/") and again[file] != first[file]}
        assert different <= {f"{name}/quantization_report.json"}


def test_smaller_groups_reach_the_config(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, intermediate_size=192)
    (result,) = quantize(model, tmp_path / "variants", "rtn", "w4a16")
    assert group(tmp_path / "variants/w4a16")["weights"]["group_size"] == result.group_size == 64


def test_the_files_say_what_a_variant_was_made_of(model: Path, variants: Path) -> None:
    text = (variants / "w8a8/recipe.yaml").read_text()
    assert f"schema: {SCHEMA}" in text and "llmcompressor: 0." in text and "model: tiny" in text
    written = report(variants / "w8a8")
    assert set(written["files"]) == set(digests(variants / "w8a8")) - {"quantization_report.json"}
    assert written["calibration"]["samples"] == FEW["samples"]
    for file in ("recipe.yaml", "quantization_report.json"):
        assert str(model.parent) not in (variants / "w8a8" / file).read_text()


def test_awq_scales_norms_and_leaves_the_cache(model: Path, variants: Path, tmp_path: Path) -> None:
    (w4a16,) = quantize(model, tmp_path / "variants", "awq", "w4a16")
    source, scaled = tensors(model), tensors(tmp_path / "variants/w4a16")
    norm = "model.layers.0.input_layernorm.weight"
    assert quantizing.relative_error(scaled[norm].float(), source[norm].float()) > 0.05
    merge_checkpoints([("w8a8", variants / "w8a8"), ("w4a16", w4a16.folder)], tmp_path / "merged")


def test_llmcompressors_own_groups_and_observers(small: Path, tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"eight": {"targets": ["re:.*mlp.*_proj$"], "weights": weights}}
    arguments = {"config_groups": groups, "ignore": ["lm_head"], "weight_observer": "memoryless_mse"}
    (made,) = quantize(small, tmp_path, recipe(w8a16={"QuantizationModifier": arguments}))
    assert (group(Path(made.folder))["weights"]["observer"], made.group_size) == ("memoryless_mse", 32)
    assert report(Path(made.folder))["quantized_linears"] == 3


def test_arguments_are_llmcompressors_but_for_four() -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.quip import QuIPModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    ours = {"group_size", "first_token_weight", "asymmetric_activations", "where_possible"}
    for modifier in (GPTQModifier, QuantizationModifier, AWQModifier, SmoothQuantModifier, QuIPModifier):
        assert set(MODIFIERS[modifier.__name__].model_fields) - ours <= set(modifier.model_fields), modifier


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_generation_settings_are_kept_as_they_are(own: Path, tmp_path: Path, name: str) -> None:
    """Settings that transformers refuses to save: published models have them, and vLLM reads them."""
    edits.edit_json(name, lambda settings: settings.update(top_k=20, temperature=0.7))(own)
    quantize(own, tmp_path / "variants", recipe(w8a8=RTN))
    written = tmp_path / "variants/w8a8/generation_config.json"
    assert json.loads(written.read_text())["temperature"] == 0.7
    if name == written.name:
        assert written.read_bytes() == (own / name).read_bytes()


def test_calibration_on_text_and_on_messages(own: Path, tmp_path: Path) -> None:
    (own / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (text := tmp_path / "prose.txt").write_text("A paragraph of prose.\n\nAnd another one.\n" * 20)
    chat = {"messages": [{"role": "user", "content": "Hello there! " * 100}]}
    (chats := tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    by = recipe(w4a16=W4A16)
    quantize(own, tmp_path / "text", by, calibration=text)
    settings = Calibration(data=str(chats), samples=4, length=64, seed=3)
    as_said = {"samples": None, "length": None, "seed": 0}
    quantize(own, tmp_path / "chats", replace(by, calibration=settings), **as_said)
    assert (tmp_path / "chats/w4a16/chat_template.jinja").is_file()
    used = load_recipe(tmp_path / "chats/w4a16/recipe.yaml").calibration
    assert used == Calibration(data="chats.jsonl", samples=4, length=64, seed=0)
    weights = [digests(tmp_path / kind)["w4a16/model.safetensors"] for kind in ("text", "chats")]
    assert weights[0] != weights[1]


# It finds what a release of auto-round changes; recipes here do not use it.
@pytest.mark.full
def test_rounding_is_learnt(model: Path, tmp_path: Path) -> None:
    arguments = {"ignore": ["lm_head"], "scheme": "W4A16", "group_size": 64}
    learning = {"AutoRoundModifier": {**arguments, "iters": 8, "batch_size": 2}}
    quantize(model, tmp_path, recipe(nearest={"QuantizationModifier": arguments}, learnt=learning))
    assert "auto-round" in report(tmp_path / "learnt")["made_from"]["versions"]
    nearest, learnt = (tensors(tmp_path / way) for way in ("nearest", "learnt"))
    ours, others = ({name: (w.shape, w.dtype) for name, w in way.items()} for way in (nearest, learnt))
    assert ours == others
    different = [name for name in nearest if not nearest[name].equal(learnt[name])]
    assert any(name.endswith("weight_packed") for name in different)
    assert all(name.endswith(("weight_packed", "weight_scale")) for name in different)


WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize("by", ["rtn", "default"])
def test_build_stores_it_once(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, transform=with_an_unused_row)
    asked = ["build", str(model), "--output", str(tmp_path / "merged"), "--recipe", by, "--head", "int8"]
    assert cli.main([*asked, *OPTIONS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    tensors = tensors_of(tmp_path / "merged")
    packed, scale = tensors[f"shared.{HEAD}.weight_packed"], tensors[f"shared.{HEAD}.weight_scale"].float()
    integers = (packed[..., None] >> torch.arange(0, 32, 8) & 255).flatten(1) - 128
    exact = load_file(model / "model.safetensors")[f"{HEAD}.weight"].float()
    # A scale in bfloat16 puts the largest weight of a row up to 0.8 steps beside its integer.
    assert ((integers * scale - exact).abs() <= 0.8 * scale).all() and (integers[7] == 0).all()
    assert (integers.abs().amax(1)[8:] >= 126).all()
    merged, _ = read_merged_config(tmp_path / "merged")
    assert HEAD in merged.shared_modules
    for name, variant in merged.variants.items():
        section = variant.quantization_config
        (group,) = (g for g in section["config_groups"].values() if HEAD in str(g["targets"]))
        assert group["weights"].items() >= WEIGHTS.items() and HEAD not in section["ignore"]
        assert (group["format"], group["input_activations"]) == ("pack-quantized", None)
        assert result["variants"][name]["losses"]
    again = quantize(model, tmp_path / "again", str(tmp_path / "merged-variants" / "w8a8" / "recipe.yaml"))
    assert tensors_of(Path(again[0].folder))[f"{HEAD}.weight_packed"].equal(packed)


@pytest.mark.parametrize(
    ("options", "by", "said"),
    [
        ({"tie_word_embeddings": True}, RTN | {"head": "int8"}, "serve with a policy that has 'head: int8'"),
        ({}, RTN | {"head": "int4"}, "give one of stored, int8"),
        ({}, {"QuantizationModifier": {"scheme": "W8A8"}}, "'head: int8' beside the modifiers"),
    ],
)
def test_what_is_refused(options: dict[str, Any], by: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, **options)
    with pytest.raises(FlexQuantError, match=said):
        quantize(model, tmp_path / "output", recipe(w8a8=by))
    assert not (tmp_path / "output").exists()


def test_the_readmes_recipe(tmp_path: Path) -> None:
    # Large enough that one unit is less than the recipe's budget.
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=4)
    (file := tmp_path / "recipe.yaml").write_text(readme.documents("flexquant.recipe/v1")[0])
    arguments = [str(model), "--output", str(tmp_path / "variants"), "--recipe", str(file), *OPTIONS]
    assert cli.main(["quantize", *arguments]) == 0
    ignored = quantizing.section(tmp_path / "variants/w8a8")["ignore"]
    assert len(ignored) > 1 and "lm_head" in ignored
