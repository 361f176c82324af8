# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Prefix caching and chunked prefill with routes that change between writing and reading the KV cache."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.integration.conftest import answers, engine, every_plan_of, take_policy
from tests.integration.logprobs import distance

pytestmark = pytest.mark.engine

PREFIX = "The harbour was quiet that morning, and the fishermen mended their nets by the wall. " * 18
PROMPTS = [PREFIX + "At noon the wind", PREFIX + "In the evening the children"]
OPTIONS = {"enable_prefix_caching": True, "max_num_batched_tokens": 128, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def asked(real_merged, tmp_path_factory):
    """Return the answers to the second prompt, and their passes, by what the cache held before.

    The cache held ``nothing``; the prefix as ``phase`` writes it (``own``); or as ``w4a16`` does (``other``,
    and ``apart``, where the request has a salt of its own).
    """
    union, trace = every_plan_of(["phase", "w4a16"]), tmp_path_factory.mktemp("caching") / "trace.jsonl"
    found, lengths = {}, [1]
    with engine(real_merged, union, flexquant={"trace": str(trace)}, **OPTIONS) as llm:
        writers = {"nothing": None, "own": "phase", "other": "w4a16", "apart": "w4a16"}
        for held, writer in writers.items():
            take_policy(llm, writer or "phase")
            if writer:
                answers(llm, PROMPTS[:1])
            take_policy(llm, "phase", empty_cache=False)
            lengths.append(len(trace.read_text().splitlines()))
            salted = [{"prompt": PROMPTS[1], "cache_salt": "its own"}]
            found[held] = answers(llm, salted if held == "apart" else PROMPTS[1:])
            lengths.append(len(trace.read_text().splitlines()))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    passes = [lines[first:last] for first, last in pairwise(lengths)][1::2]
    return found, dict(zip(found, passes, strict=True))


def test_a_cached_prefix_is_not_prefilled_again(asked):
    _, passes = asked
    prefilled = {
        held: sum(p["tokens"] for p in taken if p["phase"] == "prefill") for held, taken in passes.items()
    }
    assert prefilled["nothing"] > 2 * OPTIONS["max_num_batched_tokens"], "in several chunks"
    assert prefilled["own"] == prefilled["other"] < prefilled["nothing"] / 2
    assert prefilled["apart"] == prefilled["nothing"]
    for taken in passes.values():
        assert {(p["phase"], p["plan"]) for p in taken} == {("prefill", "w8a8"), ("decode", "w4a16")}


def test_what_a_plan_wrote_another_reads_as_if_it_had_just_been_written(asked):
    """Chunks that end elsewhere round otherwise; keys and values of other weights differ by far more."""
    found, _ = asked
    own, other = (distance(found["nothing"], found[held]) for held in ("own", "other"))
    print(f"Mean distance in nats from an empty cache's answer: own {own:.4f}, other {other:.4f}")
    assert own < other / 4


def test_a_request_with_a_salt_of_its_own_reads_nothing_that_another_plan_wrote(asked):
    found, _ = asked
    assert found["apart"] == found["nothing"]
