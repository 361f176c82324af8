# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""AutoRound, as a recipe names it: rounding that is learnt, in a checkpoint like any other W4A16 variant."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.quantize.folders import report
from tests.quantize.quantizing import quantize, recipe

W4A16 = {"ignore": ["lm_head"], "scheme": "W4A16", "group_size": 64}


def test_rounding_is_learnt(model: Path, tmp_path: Path) -> None:
    by = recipe(
        nearest={"QuantizationModifier": W4A16},
        learnt={"AutoRoundModifier": {**W4A16, "iters": 8, "batch_size": 2}},
    )
    quantize(model, tmp_path, by)
    assert "auto-round" in report(tmp_path / "learnt")["made_from"]["versions"]
    nearest, learnt = (load_file(tmp_path / way / "model.safetensors") for way in ("nearest", "learnt"))
    assert {name: (w.shape, w.dtype) for name, w in nearest.items()} == {
        name: (w.shape, w.dtype) for name, w in learnt.items()
    }
    different = [name for name in nearest if not nearest[name].equal(learnt[name])]
    assert any(name.endswith("weight_packed") for name in different)
    assert all(name.endswith(("weight_packed", "weight_scale")) for name in different)
