# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A rank's part of each linear is what vLLM gives it: by outputs, by inputs, or all of it."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from flexquant.planning.planned_model import QKV, REPLICATED, ROW_PARALLEL, Linear

SPLITS = {
    "RowParallelLinear": ROW_PARALLEL,
    "ReplicatedLinear": REPLICATED,
    "GateLinear": REPLICATED,
    "QKVParallelLinear": QKV,
}
OUTSIDE_OF_LAYERS = {"project_in", "project_out", "v_head"}
OF_OTHER_NAMES = {"layer", "classifier", "proj", "wq_b", "linear", "modality_router", "v_router", "qkv_proj"}
"""Linears that transformers names otherwise, or that only models without a prediction have whole."""


def names_in_vllm() -> dict[str, set[str]]:
    """Return the class of a linear in vLLM -> the attributes that hold one in its text models."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model_executor"
    files = [folder / "models" / f"{module}.py" for module, _ in _TEXT_GENERATION_MODELS.values()]
    found = defaultdict(set)
    for file in {*files, *(folder / "layers" / "mamba").glob("*.py")}:
        for node in ast.walk(ast.parse(file.read_text() if file.is_file() else "")):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made, target = node.value.func, node.targets[0]
                if isinstance(made, ast.Name) and isinstance(target, ast.Attribute):
                    found[made.id].add(target.attr)
    return found


def test_the_names_are_those_of_vllms_models() -> None:
    in_vllm = names_in_vllm()
    assert {"o_proj", "down_proj", "out_proj"} <= in_vllm["RowParallelLinear"]
    for its_class, names in SPLITS.items():
        assert in_vllm[its_class] - names <= OUTSIDE_OF_LAYERS | OF_OTHER_NAMES, its_class
    by_outputs = in_vllm["ColumnParallelLinear"] | in_vllm["MergedColumnParallelLinear"]
    assert "gate_up_proj" in by_outputs and not by_outputs & (ROW_PARALLEL | REPLICATED)


LINEAR = Linear(96, 40, 4000, "w8a8")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.0.mlp.gate_up_proj", Linear(24, 40, 1000, "w8a8")),
        ("layers.0.mlp.down_proj", Linear(96, 10, 1000, "w8a8")),
        ("layers.0.mlp.experts.down_proj", Linear(96, 10, 1000, "w8a8")),
        ("layers.0.mlp.gate", LINEAR),
        ("o_proj", Linear(96, 10, 1000, "w8a8")),
    ],
)
def test_a_part(name: str, part: Linear) -> None:
    assert LINEAR.share(name, 4) == part
    assert LINEAR.share(name, 1) == LINEAR


@pytest.mark.parametrize(
    ("name", "problem"),
    [("a.o_proj", "the 40 inputs of 'a.o_proj'"), ("a.up_proj", "the 96 outputs of 'a.up_proj'")],
)
def test_what_ranks_cannot_share_is_refused(name: str, problem: str) -> None:
    with pytest.raises(FlexQuantError, match=f"{problem} cannot be shared evenly by 7 devices; give"):
        LINEAR.share(name, 7)
