# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints of several makers, formats and dtypes are merged as they are, and answer as in stock vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flexquant.merge import merge_checkpoints
from tests.foreign import write_foreign
from tests.integration.conftest import generate
from tests.integration.logprobs import assert_equal_but_for_ties
from tests.publishers.edits import in_half

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "The three laws of motion"]


@pytest.mark.parametrize("method", [pytest.param("gptq", marks=pytest.mark.full), "awq"])
def test_it_answers_as_vllm_does_from_the_format_itself(
    method: str, real_variants: dict[str, Path], real_symmetric: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM for CPUs takes no GPTQ with zero points, which the model's own INT4 variant has."""
    variants = real_symmetric if method == "gptq" else real_variants
    foreign = write_foreign(variants["w4a16"], tmp_path / method, method)
    merge_checkpoints({"w8a8": variants["w8a8"], "w4a16": foreign}, tmp_path / "merged")

    w4a16, phase = generate(tmp_path / "merged", ["w4a16", "phase"], PROMPTS)
    (stock,) = generate(foreign, None, PROMPTS)
    assert_equal_but_for_ties(w4a16.answers[0], stock.answers[0])
    assert {(p["phase"] == "decode", p["plan"]) for p in phase.passes} == {(False, "w8a8"), (True, "w4a16")}


@pytest.mark.full
def test_variants_of_two_dtypes_answer_as_their_sources_do_in_one(
    real_variants: dict[str, Path], tmp_path: Path
) -> None:
    half = shutil.copytree(real_variants["w8a8"], tmp_path / "half")
    in_half(half)
    sources = {"w8a8": half, "w4a16": real_variants["w4a16"]}
    merge_checkpoints(sources, tmp_path / "merged", dtype="bfloat16")
    merged = generate(tmp_path / "merged", list(sources), PROMPTS)
    for found, source in zip(merged, sources.values(), strict=True):
        (stock,) = generate(source, None, PROMPTS, dtype="bfloat16")
        assert_equal_but_for_ties(found.answers[0], stock.answers[0])


ONLY_BF16 = "schema: flexquant.policy/v1\nrules: [{use: bf16}]\n"
PREFILL_IN_BF16 = "schema: flexquant.policy/v1\nrules: [{when: {phase: decode}, use: w4a16}, {use: bf16}]\n"


def test_a_model_in_16_bit_is_served_beside_its_int4(
    real_model: Path, real_variants: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text(PREFILL_IN_BF16)
    sources = {"bf16": real_model, "w4a16": real_variants["w4a16"]}
    merge_checkpoints(sources, tmp_path / "merged", policy=str(tmp_path / "policy.yaml"))
    bf16, mixed = generate(tmp_path / "merged", [ONLY_BF16, PREFILL_IN_BF16], PROMPTS)
    (stock,) = generate(real_model, None, PROMPTS)
    assert_equal_but_for_ties(bf16.answers[0], stock.answers[0])
    assert {(p["phase"] == "decode", p["plan"]) for p in mixed.passes} == {(False, "bf16"), (True, "w4a16")}
