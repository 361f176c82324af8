# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Sampling from a model: temperatures and prompts of rows side by side, end tokens, known languages."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.quantization.sampling import ENGLISH, end_tokens, known_languages, sample, vocabulary_word

COLD = 1e-5
PROMPTS = [[5, 6, 7, 8, 9], [50]]


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), load_tokenizer(model)


def test_every_row_has_its_own_temperature(loaded: tuple[Any, Any]) -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(sample(*loaded, PROMPTS, [COLD, 1.0], 12))
    (cold, warm), (cold_again, warm_again) = found
    assert cold == cold_again and warm != warm_again
    assert len(cold) <= 12 and len(warm) <= 12


def test_a_row_is_the_same_beside_longer_ones(loaded: tuple[Any, Any]) -> None:
    beside = sample(*loaded, PROMPTS, [COLD, COLD], 12)
    assert beside == [sample(*loaded, [prompt], [COLD], 12)[0] for prompt in PROMPTS]


def test_what_is_written_fits_into_the_models_positions(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = [65] * (model.config.max_position_embeddings - 3)
    (written,) = sample(model, tokenizer, [prompt], [1.0], 12)
    assert len(written) <= 3


def test_the_end_token_is_left_out(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert end_tokens(model, tokenizer) == [257]
    (whole,) = sample(model, tokenizer, [[50]], [COLD], 12)
    model.generation_config.eos_token_id = [257, whole[4]]
    try:
        (ended,) = sample(model, tokenizer, [[50]], [COLD], 12)
    finally:
        model.generation_config.eos_token_id = 257
    assert ended == whole[: whole.index(whole[4])]


def test_english_is_known_and_words_come_from_the_vocabulary(loaded: tuple[Any, Any]) -> None:
    assert known_languages(*loaded)[0] is ENGLISH
    # a vocabulary of single bytes has no words
    assert vocabulary_word(loaded[1], Random(0)) == ENGLISH.openings[0]
