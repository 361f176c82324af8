# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a recipe says that its variant lost: read, and held against a bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.checkpoint.measured_loss import loss_lines, read_losses

RECIPE = """schema: flexquant.recipe/v1
measured:
  code: {documents: 2, kl: KL, kl_error: 0.01, perplexity: PERPLEXITY, perplexity_error: .inf, same_top: 0.5}
"""


def lines(folder: Path, kl: str, perplexity: str, bound: float = 0.1) -> list[str]:
    (folder / "recipe.yaml").write_text(RECIPE.replace("KL", kl, 1).replace("PERPLEXITY", perplexity))
    return loss_lines(read_losses({"w4a16": folder / "recipe.yaml"}), bound)


@pytest.mark.parametrize(
    ("kl", "perplexity"), [(".nan", "0.01"), ("0.01", ".nan"), ("-.inf", "0.01"), ("0.01", ".inf")]
)
def test_what_is_no_finite_number_is_too_much(kl: str, perplexity: str, tmp_path: Path) -> None:
    *table, said = lines(tmp_path, kl, perplexity, bound=1e9)
    assert said.startswith("w4a16 LOSES TOO MUCH") and "not finite" in said
    assert "not finite" in table[-1] and "nan" not in said.lower() + table[-1].lower()


@pytest.mark.parametrize(
    ("kl", "perplexity", "too_much"),
    [("0.1", "0.1", False), ("0.101", "0.01", True), ("0.01", "0.101", True), ("null", "0.01", True)],
)
def test_either_of_the_two_may_be_too_much(kl: str, perplexity: str, too_much: bool, tmp_path: Path) -> None:
    assert ("LOSES TOO MUCH" in lines(tmp_path, kl, perplexity)[-1]) is too_much
