# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The search for SmoothQuant's strength: what it tries and gains; GPTQ on normalised tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file

from flexquant.errors import FlexQuantError
from flexquant.quantization import modifiers
from flexquant.quantization.modifiers import TokenNormalizedGPTQ, smoothing_scales
from flexquant.quantization.oneshot import load_model, run_modifiers
from flexquant.quantization.recipe import load_recipe
from flexquant.quantization.resolve import resolve_variant
from flexquant.quantization.source_model import MLP_NORM, empty_model, read_source
from tests.architectures.models import random_model, small_config
from tests.checkpoints import StateDict, byte_tokenizer, make_checkpoint
from tests.conftest import rest_full
from tests.quantize.quantizing import RTN, digests, quantize, recipe, report

GRID = [0.3, 0.5, 0.7, 0.9]
DIFFERENT = ("llama", "gemma2", "gemma3_text", "phi3", "glm4", "granite", "qwen3", "qwen3_5_text")
"""Model types whose layers differ; the full run finds a release of transformers that changes another."""
FIRST_NORM, NORM = "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"
W8A8 = {"GPTQModifier": {"ignore": ["lm_head"], "scheme": "W8A8"}}


def add_outliers(state: StateDict) -> StateDict:
    """Make a few input channels large: hugely in layer 0, a little in layer 1, and in front of down_proj."""
    state["model.layers.0.input_layernorm.weight"][::16] *= 60
    state["model.layers.0.post_attention_layernorm.weight"][5::32] *= 40
    state["model.layers.0.mlp.up_proj.weight"][::64] *= 30
    state["model.layers.1.input_layernorm.weight"][3::16] *= 4
    return state


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("outliers")
    model = make_checkpoint(folder / "model", scheme=None, transform=add_outliers)
    by = recipe(w8a8={"SmoothQuantModifier": {"smoothing_strength": GRID}, **W8A8})
    (result,) = quantize(model, folder / "variants", by)
    smoothing = report(Path(result.folder))["smoothing"]
    assert result.mse_gain == smoothing["mse_gain"] > 1
    return smoothing


def test_every_mapping_has_the_strength_with_the_smallest_error(searched: dict[str, Any]) -> None:
    assert len(searched["mappings"]) == 6
    for found in searched["mappings"].values():
        assert set(found["mse_by_alpha"]) == {"none", *map(str, GRID)}
        chosen = "none" if found["chosen"] is None else str(found["chosen"])
        assert found["mse_by_alpha"][chosen] == min(found["mse_by_alpha"].values())


def test_a_strength_per_mapping_beats_one_for_all(searched: dict[str, Any]) -> None:
    errors = [found["mse_by_alpha"] for found in searched["mappings"].values()]
    sums = {alpha: sum(by_alpha[alpha] for by_alpha in errors) for alpha in errors[0]}
    best = sum(min(by_alpha.values()) for by_alpha in errors)
    assert best < sums["0.5"] < sums["none"]
    assert searched["mse_gain"] == pytest.approx(sums["0.5"] / best)
    assert len({found["chosen"] for found in searched["mappings"].values()}) > 1


def test_the_usual_strength_is_measured_and_not_chosen_unless_it_is_a_candidate(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, transform=add_outliers)
    by = recipe(w8a8={"SmoothQuantModifier": {"smoothing_strength": [0.95]}, **RTN})
    (result,) = quantize(model, tmp_path / "variants", by)
    mappings = report(Path(result.folder))["smoothing"]["mappings"].values()
    errors = [found["mse_by_alpha"] for found in mappings]
    assert any(of["0.5"] < min(of["none"], of["0.95"]) for of in errors)
    assert {found["chosen"] for found in mappings} <= {None, 0.95}


def test_one_strength_for_all_is_not_searched(small: Path, tmp_path: Path) -> None:
    (result,) = quantize(small, tmp_path / "variants", "plain", "w8a8")
    assert (result.smoothed, result.mse_gain) == (2, None)
    resolved = load_recipe(Path(result.folder) / "recipe.yaml").variants["w8a8"]
    assert resolved.modifiers["SmoothQuantModifier"]["smoothing_strength"] == {FIRST_NORM: 0.5, NORM: 0.5}


def smoothed_at(strengths: dict[str, float | None], model: Path, output: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a W8A8 variant that is smoothed with fixed strengths."""
    front = {"smoothing_strength": strengths, "mappings": "norms"}
    (result,) = quantize(model, output, recipe(w8a8={"SmoothQuantModifier": front, **RTN}))
    return load_file(Path(result.folder) / "model.safetensors")


def test_a_mapping_fixed_at_null_is_not_smoothed(small: Path, tmp_path: Path) -> None:
    strengths, source = {FIRST_NORM: None, NORM: 0.8}, load_file(small / "model.safetensors")
    made = smoothed_at(strengths, small, tmp_path / "variants")
    for name, alpha in strengths.items():
        assert torch.equal(source[f"{name}.weight"], made[f"{name}.weight"]) == (alpha is None)


def amplify(state: StateDict) -> StateDict:
    """Make the largest inputs and the largest weights unequal, so that their mean depends on the strength."""
    state[f"{NORM}.weight"] *= 4
    return state


def test_a_fixed_strength_is_the_one_that_scales(tmp_path: Path) -> None:
    """The scales' logarithm is linear in the strength: at 0.5 it lies halfway between 0.2 and 0.8."""
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, transform=amplify)
    source = load_file(model / "model.safetensors")[f"{NORM}.weight"].float()

    def log_scales(alpha: float) -> torch.Tensor:
        made = smoothed_at({FIRST_NORM: None, NORM: alpha}, model, tmp_path / str(alpha))
        return (source / made[f"{NORM}.weight"]).log()

    low, half, high = (log_scales(alpha) for alpha in (0.2, 0.5, 0.8))
    assert torch.allclose(half, (low + high) / 2, atol=0.02)  # bfloat16's rounding
    assert (high - low).abs().min() > 0.1


@pytest.mark.parametrize("kind", rest_full(sorted(MLP_NORM), *DIFFERENT))
def test_a_smoothed_model_computes_the_same(kind: str, tmp_path: Path) -> None:
    """The norms of each architecture feed nothing but the linears into which their scales move."""
    random_model(small_config(kind, num_hidden_layers=4)).save_pretrained(tmp_path)
    model = load_model(read_source(tmp_path))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            parameter.data[::16] += 4
    settings = recipe(w8a8={"SmoothQuantModifier": {"smoothing_strength": 0.5}, **W8A8}).variants["w8a8"]
    variant = resolve_variant(settings, empty_model(model.config), kind)
    ids = torch.arange(3, 67)
    smoothing, _ = modifiers.build_modifiers(variant, len(ids))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = model(ids[None]).logits.detach()
    run_modifiers(model, byte_tokenizer(model.config), [smoothing], [ids], seed=0)
    assert len(variant.smoothed) >= 8
    for name in variant.smoothed:
        assert not torch.equal(model.get_parameter(f"{name}.weight"), before[f"{name}.weight"])
    torch.testing.assert_close(model(ids[None]).logits, expected, rtol=1e-3, atol=1e-3)


def test_the_largest_inputs_are_those_of_all_rows() -> None:
    smoothing = modifiers.SearchedSmoothQuant(fixed={"norm": 0.5}, scales_={})
    for row in ([1.0, -5.0], [3.0, 2.0]):
        smoothing._observer("norm")(torch.nn.Identity(), (torch.tensor([row]),), None)
    assert smoothing.scales_["norm"].max_channel_vals.tolist() == [3.0, 5.0]


def test_scales_are_smoothquants_and_dead_channels_are_left_as_they_are() -> None:
    x, w = torch.tensor([4.0, 9.0]), torch.tensor([0.25, 1.0])
    assert torch.allclose(smoothing_scales(0.5, x, w), torch.tensor([4.0, 3.0]))
    assert torch.allclose(smoothing_scales(1.0, x, w), x)
    assert torch.allclose(smoothing_scales(0.0, x, w), 1 / w)
    assert torch.equal(smoothing_scales(None, x, w), torch.ones(2))
    scales = smoothing_scales(0.5, torch.tensor([0.0, 4.0, 4.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert torch.equal(scales, torch.tensor([1.0, 1.0, 2.0]))


W4A16 = {"ignore": ["lm_head"], "scheme": "W4A16"}


def normalised(first_token_weight: float) -> TokenNormalizedGPTQ:
    return TokenNormalizedGPTQ(**W4A16, first_token_weight=first_token_weight)


def hessian(modifier: GPTQModifier, x: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.Linear(x.shape[-1], 4, bias=False)
    modifier.calibrate_module(linear, (x,), None)
    return modifier._hessians[linear]


@pytest.fixture
def x() -> torch.Tensor:
    """Return inputs [rows, tokens, in] of one row."""
    return torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(0))


def test_a_huge_token_changes_the_hessian_of_plain_gptq_only(x: torch.Tensor) -> None:
    huge = x.clone()
    huge[:, 5] *= 1000

    def change(make) -> float:
        before, after = hessian(make(), x), hessian(make(), huge)
        return float((after - before).norm() / before.norm())

    assert change(lambda: GPTQModifier(**W4A16)) > 1000
    assert change(lambda: normalised(10)) < 1e-5


def test_the_first_token_counts_for_several(x: torch.Tensor) -> None:
    once, tenfold = (hessian(normalised(weight), x) for weight in (1, 10))
    first = hessian(normalised(1), x[:, :1])
    assert torch.allclose(tenfold - once, 9 * first, rtol=1e-4, atol=1e-5)


def test_inputs_of_an_expert_are_those_of_one_row(x: torch.Tensor) -> None:
    assert torch.equal(hessian(normalised(10), x), hessian(normalised(10), x[0]))


def test_an_input_of_another_shape_is_refused_and_no_feature_scaled(x: torch.Tensor) -> None:
    with pytest.raises(FlexQuantError, match=r"\[8\].*expected \[rows, tokens, in\].*first_token_weight"):
        hessian(normalised(10), x[0, 0])
    plain, flat = (hessian(normalised(1), inputs) for inputs in (x, x[0]))
    assert torch.allclose(plain / plain.trace(), flat / flat.trace(), rtol=1e-4, atol=1e-6)


def test_a_recipe_chooses_it(model: Path, tmp_path: Path) -> None:
    ways = {"plain": W4A16, "normalised": {**W4A16, "first_token_weight": 10}}
    quantize(model, tmp_path, recipe(**{way: {"GPTQModifier": arguments} for way, arguments in ways.items()}))
    plain, other = (digests(tmp_path / way)["model.safetensors"] for way in ways)
    assert plain != other
