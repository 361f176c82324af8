# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Variants of models whose config ties the lm_head: each answers with the head that stock vLLM gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.merge import merge_checkpoints
from tests.integration.conftest import answers, engine, generate, take_policy
from tests.tied_heads import make_tied, without_key

pytestmark = pytest.mark.engine

PROMPTS = ["The harbour was quiet", "A box of old letters"]
VARIANTS = ["w8a8", "w4a16"]
TWO_HEADS = {"w8a8": "other", "w4a16": "another"}
ONE_COPY = {"w8a8": "copy", "w4a16": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    models = {"two": TWO_HEADS, "copy": ONE_COPY, "one": {"w8a8": "other", "w4a16": None}}
    for model, heads in models.items():
        sources = {name: make_tied(folder / model / name, name, head) for name, head in heads.items()}
        merge_checkpoints(sources, folder / model / "merged")
    return folder


@pytest.mark.parametrize(
    "model", ["two", *(pytest.param(model, marks=pytest.mark.full) for model in ("copy", "one"))]
)
def test_every_variant_has_the_head_that_stock_vllm_gives_it(folder: Path, model: str) -> None:
    w8a8, w4a16, phase = generate(folder / model / "merged", [*VARIANTS, "phase"], PROMPTS)
    for name, found in (("w8a8", w8a8), ("w4a16", w4a16)):
        (stock,) = generate(folder / model / name, None, PROMPTS)
        assert found.answers == stock.answers
    (alone,) = generate(folder / model / "merged", ["w4a16"], PROMPTS)
    assert alone.answers == w4a16.answers
    (after_prompt, expected) = ([steps[0] for _, steps in s.answers[0]] for s in (phase, w8a8))
    assert after_prompt == expected


def test_a_model_that_is_tied_by_default_starts_without_the_key(tmp_path: Path) -> None:
    sources = {
        name: without_key(make_tied(tmp_path / name, name, None, "gemma3"), "tie_word_embeddings")
        for name in VARIANTS
    }
    merge_checkpoints(sources, tmp_path / "merged")
    (stock,) = generate(sources["w8a8"], None, PROMPTS)
    with engine(tmp_path / "merged") as llm:
        take_policy(llm, "w8a8")
        assert [answers(llm, PROMPTS)] == stock.answers
