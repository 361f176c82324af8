# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A linear whose inputs are rotated when it runs answers as one without, also in one copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint, make_pair
from tests.integration.conftest import distance, generate
from tests.integration.test_serving_errors import configure, flexquant, refusal
from tests.policies import rules
from tests.rotations import make_rotated

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is a city of more than two million people,", "def merge(a, b):"]
SAMPLING = {"max_tokens": 8}
POLICIES = ["w8a8", "w4a16", "one-copy"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_way_to_its_weights_rotates_its_inputs(tmp_path: Path, compiled: bool) -> None:
    sources = {scheme: make_rotated(tmp_path / scheme, scheme) for scheme in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "rotated")
    merge_checkpoints(make_pair(tmp_path / "pair"), tmp_path / "plain")
    (in_int8, in_int4, from_int4), (plain_in_int8, plain_in_int4, _) = (
        [
            one.answers[0]
            for one in generate(
                tmp_path / name, POLICIES, PROMPTS, sampling=SAMPLING, enforce_eager=not compiled
            )
        ]
        for name in ("rotated", "plain")
    )
    rounding = distance(plain_in_int4, plain_in_int8)
    assert distance(in_int8, plain_in_int8) < rounding / 2
    assert distance(from_int4, in_int4) < rounding / 2
    assert distance(in_int4, in_int8) < 1.5 * rounding


def test_tensor_parallelism_is_refused_where_inputs_are_rotated(tmp_path: Path) -> None:
    sources = {
        "w8a8": make_rotated(tmp_path / "w8a8", "w8a8"),
        "w4a16": make_checkpoint(tmp_path / "w4a16", scheme="w4a16"),
    }
    merge_checkpoints(sources, tmp_path / "merged")
    problem = refusal(tmp_path / "merged", tensor_parallel_size=2, **flexquant(policy="phase"))
    assert "'w8a8', whose linears' inputs are rotated in each pass, under tensor parallelism" in problem
    assert "drop --cpu-offload-gb" in refusal(
        tmp_path / "merged", cpu_offload_gb=1, **flexquant(policy="phase")
    )
    configure(tmp_path / "merged", tensor_parallel_size=2, **flexquant(policy="w4a16"))


def test_the_matrix_is_loaded_where_its_layer_is_in_no_plan(tmp_path: Path) -> None:
    """The checkpoint has it under layer 0 alone. A second engine finds its memory where the first left it."""
    rotated = {
        "w8a8": make_rotated(tmp_path / "w8a8", "w8a8"),
        "w4a16": make_checkpoint(tmp_path / "w4a16", scheme="w4a16"),
    }
    merge_checkpoints(rotated, tmp_path / "rotated")
    merge_checkpoints(make_pair(tmp_path / "pair"), tmp_path / "plain")
    policies = [rules('- use: {default: w8a8, layers: {"0": w4a16}}')]
    first, second, plain = (
        generate(tmp_path / name, policies, PROMPTS, sampling=sampling)[0].answers[0]
        for name, sampling in (("rotated", SAMPLING), ("rotated", {"max_tokens": 7}), ("plain", SAMPLING))
    )
    assert distance(first, plain) < 0.05
    assert distance(second, plain) < 0.05
