# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Scales that are trained: nearer to the 16-bit model, with the same integers and the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from flexquant.documents.texts import draw_rows, read_documents
from flexquant.quantization.recipe import load_recipe
from tests.quantize.folders import digests
from tests.quantize.quantizing import W4A16, quantize, recipe

EPOCHS = 8
WAYS = {"plain": W4A16, "distilled": {**W4A16, "scale_distillation": {"epochs": EPOCHS}}}
WITH_ZEROS = {"GPTQModifier": {**W4A16["GPTQModifier"], "scheme": "W4A16_ASYM"}}


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("distilled") / "variants"
    quantize(model, output, recipe(**WAYS), samples=32)
    return output


def divergence(model: Path, variant: Path) -> float:
    """Return the KL divergence of a variant to the 16-bit model on other rows of the text calibrated on."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    decompressed = CompressedTensorsConfig(run_compressed=False)
    student = AutoModelForCausalLM.from_pretrained(
        variant, dtype=torch.float32, quantization_config=decompressed
    )
    found = []
    for ids in draw_rows(read_documents(None), tokenizer, samples=8, length=64, seed=1):
        with torch.inference_mode():
            expected, given = (m(torch.tensor([ids])).logits.log_softmax(-1) for m in (teacher, student))
        found.append(float((expected.exp() * (expected - given)).sum(-1).mean()))
    return sum(found) / len(found)


def test_the_answers_are_nearer_to_16_bit(model: Path, both: Path) -> None:
    plain, distilled = (divergence(model, both / way) for way in WAYS)
    assert distilled < 0.98 * plain


def test_every_epoch_is_told(both: Path) -> None:
    report = json.loads((both / "distilled/quantization_report.json").read_text())
    found = report["distillation"]["kl_by_epoch"]
    assert len(found) == EPOCHS
    assert found[-1] < 0.95 * found[0]
    assert json.loads((both / "plain/quantization_report.json").read_text())["distillation"] is None


def test_the_integers_are_those_of_gptq(both: Path) -> None:
    plain, distilled = (load_file(both / way / "model.safetensors") for way in WAYS)
    different = {name.rpartition(".")[2] for name in plain if not plain[name].equal(distilled[name])}
    assert different == {"weight_scale"}
    assert {name: w.shape for name, w in plain.items()} == {name: w.shape for name, w in distilled.items()}


def test_scales_are_trained_beside_zero_points_and_the_recipe_makes_them_again(
    model: Path, tmp_path: Path
) -> None:
    ways = {"plain": WITH_ZEROS, "distilled": {**WITH_ZEROS, "scale_distillation": {"epochs": 1}}}
    quantize(model, tmp_path, recipe(**ways), samples=8)
    plain, distilled = (load_file(tmp_path / way / "model.safetensors") for way in ways)
    different = {name.rpartition(".")[2] for name in plain if not plain[name].equal(distilled[name])}
    assert different == {"weight_scale"}
    assert any(name.endswith("weight_zero_point") for name in plain)

    again = load_recipe(tmp_path / "distilled/recipe.yaml")
    assert again.variants["distilled"].scale_distillation is not None
    quantize(model, tmp_path / "again", again, samples=8)
    first, second = (digests(folder / "distilled") for folder in (tmp_path, tmp_path / "again"))
    assert first["model.safetensors"] == second["model.safetensors"]
