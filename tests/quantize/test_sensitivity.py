# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Sensitive linears are found at the logits, spared within the budget, and stay spared when reproduced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexquant.quantization.recipe import load_recipe
from flexquant.quantization.sensitivity import spend_budget
from tests.checkpoints import StateDict, make_checkpoint
from tests.quantize.folders import digests, report, section
from tests.quantize.quantizing import W4A16, quantize, recipe

HARD = "model.layers.1.self_attn.o_proj"


def make_hard(state: StateDict) -> StateDict:
    """Make one weight in every group so large that the others round to zero."""
    state[f"{HARD}.weight"][:, ::128] *= 30
    return state


@pytest.fixture(scope="module")
def hard_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hard") / "model", scheme=None, transform=make_hard)


def test_the_hard_linear_stays_in_16_bit(hard_model: Path, tmp_path: Path) -> None:
    by = recipe(w4a16={**W4A16, "sensitive_layers": {"budget": 0.06}})
    (result,) = quantize(hard_model, tmp_path / "variants", by)
    found = report(Path(result.folder))["sensitivities"]
    assert len(found) == 8 and max(found, key=lambda unit: found[unit]["kl"]) == HARD
    assert result.spared == [HARD]
    total = sum(unit["parameters"] for unit in found.values())
    assert found[HARD]["parameters"] <= 0.06 * total
    source, made = (load_file(Path(f) / "model.safetensors") for f in (hard_model, result.folder))
    assert torch.equal(made[f"{HARD}.weight"], source[f"{HARD}.weight"])
    assert HARD in section(Path(result.folder))["ignore"]

    resolved = load_recipe(Path(result.folder) / "recipe.yaml")
    assert resolved.variants["w4a16"].modifiers["GPTQModifier"]["ignore"] == ["lm_head", HARD]
    quantize(hard_model, tmp_path / "again", resolved)
    assert (
        digests(tmp_path / "again")["w4a16/model.safetensors"]
        == digests(tmp_path / "variants")["w4a16/model.safetensors"]
    )


def test_the_hard_linear_gets_another_scheme(hard_model: Path, tmp_path: Path) -> None:
    by = recipe(w4a16={**W4A16, "sensitive_layers": {"budget": 0.06, "scheme": "W8A8"}})
    (result,) = quantize(hard_model, tmp_path / "variants", by)
    made = load_file(Path(result.folder) / "model.safetensors")
    assert made[f"{HARD}.weight"].dtype == torch.int8
    assert "model.layers.0.self_attn.o_proj.weight_packed" in made
    groups = section(Path(result.folder))["config_groups"].values()
    assert {tuple(group["targets"]) for group in groups} == {(HARD,), ("Linear",)}

    quantize(hard_model, tmp_path / "again", load_recipe(Path(result.folder) / "recipe.yaml"))
    for name in ("model.safetensors", "config.json"):
        assert digests(tmp_path / "again")[f"w4a16/{name}"] == digests(Path(result.folder))[name]


def test_most_divergence_per_parameter_that_fits() -> None:
    sizes = {"small": 10, "large": 60, "medium": 30}
    divergences = {"small": 1.0, "large": 12.0, "medium": 2.0}
    assert spend_budget(divergences, sizes, 0.7) == {"large", "small"}
    assert spend_budget(divergences, sizes, 0.5) == {"small", "medium"}
    assert spend_budget(divergences, sizes, 0.35) == {"small"}
    assert spend_budget(divergences, sizes, 0.05) == set()
    assert spend_budget({**divergences, "large": 0.0}, sizes, 0.99) == {"small", "medium"}
