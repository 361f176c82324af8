# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A constant policy is the static checkpoint: the same tokens and the same logprobs, to the last bit."""

from __future__ import annotations

import pytest

from tests.integration.conftest import answers, engine

pytestmark = pytest.mark.engine

QUESTIONS = [
    "What is the capital of France?",
    "def fibonacci(n):",
    "The three laws of motion",
    "Once upon a time, in a village by the sea,",
]
LONG = "The harbour was quiet that morning, and the boats lay still. " * 20
CHUNK = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_chunked_prefill": True}


def generate(folder, policy=None):
    """Answer one prompt alone, one prompt of four chunks alone, and sixteen prompts side by side."""
    batch = [f"{question} ({i})" for i in range(4) for question in QUESTIONS]
    batch[3] = LONG + batch[3]
    with engine(folder, policy, **CHUNK) as llm:
        assert len(llm.get_tokenizer()(LONG)["input_ids"]) > 3 * CHUNK["max_num_batched_tokens"]
        return [answers(llm, prompts) for prompts in ([QUESTIONS[0]], [LONG], batch)]


@pytest.mark.parametrize("variant", ["w8a8", "w4a16"])
def test_constant_policy_equals_stock_vllm_on_the_variants_own_folder(variant, real_variants, real_merged):
    assert generate(real_merged, policy=variant) == generate(real_variants[variant])


def test_the_variants_themselves_differ(real_merged):
    """Otherwise the test above would show nothing."""
    assert generate(real_merged, policy="w8a8") != generate(real_merged, policy="w4a16")
