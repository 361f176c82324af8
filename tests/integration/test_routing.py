# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""On a live ``vllm serve`` with concurrent requests, every pass takes the plan of the policy's table."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from examples.vllm_server import vllm_serve
from tests.integration.conftest import records_of
from tests.integration.live_server import complete, flexquant_options

pytestmark = [pytest.mark.engine, pytest.mark.oldest]

CHUNK = 128


def expected_plan(phase: str, sequences: int) -> str:
    """Return the plan that ``phase-batch`` gives, written down by hand."""
    return "w4a16" if phase == "decode" and sequences <= 32 else "w8a8"


def request_lengths() -> list[tuple[int, int]]:
    """Return (tokens of prompt, tokens to generate): so many that more than 32 are answered at a time."""
    return [(3 + 37 * i % 200, 300 + 5 * i) for i in range(48)]


@pytest.fixture(scope="module")
def passes(tiny_merged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    trace = folder / "routes.jsonl"
    arguments = flexquant_options(policy="phase-batch", trace=str(trace))
    arguments += ["--enforce-eager", "--max-model-len", "1024", "--served-model-name", "tiny"]
    arguments += ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "64"]
    with vllm_serve(tiny_merged() / "merged", *arguments, log=folder / "server.log") as url:
        client = OpenAI(base_url=url, api_key="none")

        def ask(lengths: tuple[int, int]) -> int:
            return complete(client, [1] * lengths[0], lengths[1]).usage.completion_tokens

        with ThreadPoolExecutor(48) as pool:
            lengths = list(pool.map(ask, request_lengths()))
        assert lengths == [tokens for _, tokens in request_lengths()]
    header, *records = records_of(trace)
    assert header["policy"] == "phase-batch"
    return records


def test_phases_are_those_that_the_recorded_query_lengths_imply(passes):
    for record in passes:
        if record["phase"] == "decode":
            assert record["max_query_len"] == 1 and record["tokens"] == record["sequences"], record
        else:
            assert record["tokens"] > record["sequences"], record
        if record["sequences"] == 1 and record["tokens"] > 1:
            assert record["phase"] == "prefill", record


def test_all_phases_and_both_sides_of_the_batch_threshold_occur(passes):
    assert {record["phase"] for record in passes} == {"prefill", "decode", "mixed"}
    decode = [record["sequences"] for record in passes if record["phase"] == "decode"]
    assert min(decode) <= 32 < max(decode)


def test_every_forward_pass_took_the_plan_of_the_policys_table(passes):
    for record in passes:
        assert record["plan"] == expected_plan(record["phase"], record["sequences"]), record
