# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""An lm_head in INT8 beside stock vLLM on a checkpoint that stores the rounded head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexquant.merge import merge_checkpoints
from tests.checkpoints import StateDict, make_checkpoint
from tests.integration.conftest import generate
from tests.integration.logprobs import distance

PROMPTS = ["The quick brown fox", "In the beginning was the word, and it took nine more words", "1, 2, 3"]
IN_INT8 = """schema: flexquant.policy/v1
head: int8
rules: [{use: w8a8}]
"""
EXACT = {"dtype": "float32", "max_model_len": 256}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows, inputs], each row rounded to a multiple of its 127th part."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight.float() / scale).round() * scale


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["llama", "tied llama", "gemma2"])
def test_logits_are_those_of_the_rounded_head(kind: str, tmp_path: Path) -> None:
    architecture = kind.removeprefix("tied ")
    tied = {"tie_word_embeddings": True} if kind.startswith("tied") else {}
    matrix = "model.embed_tokens.weight" if tied or kind == "gemma2" else "lm_head.weight"

    def with_an_unused_row(state: StateDict) -> StateDict:
        state[matrix][7] = 0
        return state

    def with_a_rounded_head(state: StateDict) -> StateDict:
        return state | {matrix: rounded(with_an_unused_row(state)[matrix])}

    shape = {"vocab_size": 331, **tied}
    sources = {
        scheme: make_checkpoint(
            tmp_path / scheme, architecture, scheme, transform=with_an_unused_row, **shape
        )
        for scheme in ("w8a8", "w4a16")
    }
    merge_checkpoints(sources, tmp_path / "merged")
    reference = make_checkpoint(
        tmp_path / "rounded", architecture, "w8a8", transform=with_a_rounded_head, **shape
    )
    (found,) = generate(tmp_path / "merged", [IN_INT8], PROMPTS, sampling={"prompt_logprobs": 3}, **EXACT)
    (expected,) = generate(reference, None, PROMPTS, sampling={"prompt_logprobs": 3}, **EXACT)
    (stored,) = generate(sources["w8a8"], None, PROMPTS, sampling={"prompt_logprobs": 3}, **EXACT)
    assert distance(found.answers[0], expected.answers[0]) < 1e-4
    assert distance(stored.answers[0], expected.answers[0]) > 1e-3
