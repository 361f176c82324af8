# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A model of two makers: W8A8 by llm-compressor, INT4 in the format of GPTQ or AWQ, merged and served."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.merge import convert_checkpoint, merge_checkpoints
from tests.foreign import write_foreign
from tests.integration.conftest import generate
from tests.integration.logprobs import assert_equal_but_for_ties

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "The three laws of motion"]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_it_answers_as_vllm_does_from_the_format_itself(
    method: str, real_variants: dict[str, Path], tmp_path: Path
) -> None:
    foreign = write_foreign(real_variants["w4a16"], tmp_path / method, method)
    convert_checkpoint(foreign, tmp_path / "w4a16")
    sources = {"w8a8": real_variants["w8a8"], "w4a16": tmp_path / "w4a16"}
    merge_checkpoints(sources, tmp_path / "merged")

    w4a16, phase = generate(tmp_path / "merged", ["w4a16", "phase"], PROMPTS)
    (stock,) = generate(foreign, None, PROMPTS)
    assert_equal_but_for_ties(w4a16.answers[0], stock.answers[0])
    assert {(p["phase"] == "decode", p["plan"]) for p in phase.passes} == {(False, "w8a8"), (True, "w4a16")}
