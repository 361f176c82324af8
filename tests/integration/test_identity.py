# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A constant policy is the static checkpoint: the same tokens and the same logprobs, to the last bit."""

from __future__ import annotations

import pytest

from tests.integration.conftest import generate

pytestmark = pytest.mark.engine

QUESTIONS = [
    "What is the capital of France?",
    "def fibonacci(n):",
    "The three laws of motion",
    "Once upon a time, in a village by the sea,",
]
LONG = "The harbour was quiet that morning, and the boats lay still. " * 20
CHUNK = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_chunked_prefill": True}
BATCH = [f"{question} ({i})" for i in range(4) for question in QUESTIONS]
BATCH[3] = LONG + BATCH[3]
BATCHES = ([QUESTIONS[0]], [LONG], BATCH)
"""One prompt alone, one prompt of four chunks alone, and sixteen prompts side by side."""


@pytest.fixture(scope="module")
def served(real_merged):
    """Return what the constant policies answer and the passes they take, keyed by variant."""
    variants = ["w8a8", "w4a16"]
    return dict(zip(variants, generate(real_merged, variants, *BATCHES, **CHUNK), strict=True))


@pytest.mark.parametrize("variant", ["w8a8", "w4a16"])
def test_constant_policy_equals_stock_vllm_on_the_variants_own_folder(variant, served, real_variants):
    (stock,) = generate(real_variants[variant], None, *BATCHES, **CHUNK)
    assert served[variant].answers == stock.answers


def test_prompts_came_in_chunks_and_side_by_side(served):
    """Otherwise the test above would show less than it says."""
    for variant, found in served.items():
        passes = found.passes
        assert {p["plan"] for p in passes} == {variant}
        assert sum(p["tokens"] == CHUNK["max_num_batched_tokens"] for p in passes) > 3
        assert max(p["sequences"] for p in passes) > len(BATCH) / 2


def test_the_variants_themselves_differ(served):
    """If they were equal, the first test would show nothing."""
    assert served["w8a8"].answers != served["w4a16"].answers
