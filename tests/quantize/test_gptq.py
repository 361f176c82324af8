# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""GPTQ on normalised tokens: what each token adds to the Hessian, and that recipes choose it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmcompressor.modifiers.gptq import GPTQModifier

from flexquant.errors import FlexQuantError
from flexquant.quantization.modifiers import TokenNormalizedGPTQ
from tests.quantize.folders import digests
from tests.quantize.quantizing import quantize, recipe

W4A16 = {"ignore": ["lm_head"], "scheme": "W4A16"}


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
    assert change(lambda: TokenNormalizedGPTQ(**W4A16, first_token_weight=10)) < 1e-5


def test_the_first_token_counts_for_several(x: torch.Tensor) -> None:
    once, tenfold = (hessian(TokenNormalizedGPTQ(**W4A16, first_token_weight=w), x) for w in (1, 10))
    first = hessian(TokenNormalizedGPTQ(**W4A16, first_token_weight=1), x[:, :1])
    assert torch.allclose(tenfold - once, 9 * first, rtol=1e-4, atol=1e-5)


def test_inputs_of_an_expert_are_those_of_one_row(x: torch.Tensor) -> None:
    rows, flat = (
        hessian(TokenNormalizedGPTQ(**W4A16, first_token_weight=10), inputs) for inputs in (x, x[0])
    )
    assert torch.equal(rows, flat)


def test_an_input_of_another_shape_is_refused_and_no_feature_scaled(x: torch.Tensor) -> None:
    with pytest.raises(FlexQuantError, match=r"\[8\].*expected \[rows, tokens, in\].*first_token_weight"):
        hessian(TokenNormalizedGPTQ(**W4A16, first_token_weight=10), x[0, 0])
    plain = hessian(TokenNormalizedGPTQ(**W4A16, first_token_weight=1), x)
    flat = hessian(TokenNormalizedGPTQ(**W4A16, first_token_weight=1), x[0])
    assert torch.allclose(plain / plain.trace(), flat / flat.trace(), rtol=1e-4, atol=1e-6)


def test_a_recipe_chooses_it(model: Path, tmp_path: Path) -> None:
    by = recipe(
        plain={"GPTQModifier": W4A16}, normalised={"GPTQModifier": {**W4A16, "first_token_weight": 10}}
    )
    quantize(model, tmp_path / "variants", by)
    weights = [digests(tmp_path / "variants" / name)["model.safetensors"] for name in ("plain", "normalised")]
    assert weights[0] != weights[1]
