# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Prefix caching and chunked prefill with routes that change between writing and reading the KV cache."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import answers, engine

pytestmark = pytest.mark.engine

LONG = {"max_tokens": 200, "min_tokens": 150}
PREFIX = "The harbour was quiet that morning, and the fishermen mended their nets by the wall. " * 36


def test_long_generation_after_a_cached_prefix_is_sane(real_merged, tmp_path):
    trace = tmp_path / "routes.jsonl"
    prompts = [PREFIX + "At noon the wind", PREFIX + "In the evening the children"]
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 128, "max_num_seqs": 4}
    with engine(real_merged, "phase", flexquant={"trace": str(trace)}, **options) as llm:
        cold = answers(llm, prompts[:1], **LONG)
        header_and_cold = len(trace.read_text().splitlines())
        warm, other = (answers(llm, [p], **LONG) for p in prompts)
        prompt_tokens = sum(len(llm.get_tokenizer()(p)["input_ids"]) for p in prompts)
        text = llm.get_tokenizer().decode(other[0][0])
    warm_passes = [json.loads(line) for line in trace.read_text().splitlines()[header_and_cold:]]
    prefilled = sum(p["tokens"] for p in warm_passes if p["phase"] == "prefill")

    assert prefilled < prompt_tokens / 2, "both prompts found most of their prefix in the cache"
    assert agreement(cold[0][0], warm[0][0]) > 0.5
    words = text.split()
    assert len(words) > 80
    assert sum(word.strip('.,;:!?"').isalpha() for word in words) > 0.8 * len(words), text


def agreement(a: list[int], b: list[int]) -> float:
    """Length of the common beginning, as a fraction of the longer list."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return common / max(len(a), len(b))
