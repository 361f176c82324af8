# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM's users combine with a model, together with plans that change; COMPOSITION.md lists all of it.

Prefix caching and chunked prefill come last: routes change between writing and reading the KV cache.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from vllm.platforms import current_platform

from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_pair
from tests.integration import conftest
from tests.integration.conftest import answers, check_variants, engine, generate, records_of, take_policy
from tests.integration.live_server import Live

pytestmark = pytest.mark.engine

PROMPTS = ["hello world, this is a prompt of more than one chunk " * 3, "abc", "xyz 1"]
SAMPLING = {"max_tokens": 12, "ignore_eos": True}
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512}
VARIANTS = ["w8a8", "w4a16"]
LONG = 32_768


@pytest.fixture(scope="module")
def folder(tiny_merged: Callable[..., Path]) -> Path:
    return tiny_merged()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """Return what ``phase`` answers to the prompts, with nothing else asked of vLLM."""
    (served,) = generate(folder / "merged", ["phase"], PROMPTS, sampling=SAMPLING, **OPTIONS)
    assert {(p["phase"] == "decode", p["plan"]) for p in served.passes} == {(False, "w8a8"), (True, "w4a16")}
    return served


@pytest.mark.skipif(
    current_platform.is_cpu() and not torch.cpu._is_avx512_supported(),
    reason="vLLM keeps K and V in FP8 on CPUs with AVX512",
)
def test_fp8_kv_cache(folder: Path, alone: Any) -> None:
    options = {"kv_cache_dtype": "fp8", **OPTIONS}
    sources = {variant: folder / variant for variant in VARIANTS}
    served = check_variants(folder / "merged", sources, PROMPTS, more=["phase"], sampling=SAMPLING, **options)
    assert served[-1].answers != alone.answers, "the cache was in 16 bit"
    assert [p["plan"] for p in served[-1].passes] == [p["plan"] for p in alone.passes]


@pytest.mark.full
def test_beam_search(folder: Path) -> None:
    from vllm.sampling_params import BeamSearchParams

    found = []
    for model, policy in ((folder / "merged", "w4a16"), (folder / "w4a16", None)):
        with engine(model, policy, **OPTIONS) as llm:
            parameters = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
            outputs = llm.beam_search([{"prompt": prompt} for prompt in PROMPTS[1:]], parameters)
            found.append([[(s.tokens, s.cum_logprob) for s in output.sequences] for output in outputs])
    assert found[0] == found[1]
    assert all(len({tuple(tokens) for tokens, _ in beams}) == 3 for beams in found[0])


def test_structured_output_and_prompt_embeddings(folder: Path, alone: Any, tmp_path: Path) -> None:
    """One engine does both: an answer has to match a form, and a prompt comes as its embeddings."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    trace = tmp_path / "trace.jsonl"
    options = {"enable_prompt_embeds": True, **OPTIONS}
    with engine(folder / "merged", "phase", flexquant={"trace": str(trace)}, **options) as llm:
        constrained = StructuredOutputsParams(regex=(pattern := "[0-9]{4}-[0-9]{2}"))
        parameters = SamplingParams(temperature=0, max_tokens=12, structured_outputs=constrained)
        texts = [output.outputs[0].text for output in llm.generate(PROMPTS, parameters, use_tqdm=False)]
        ids = llm.get_tokenizer()(PROMPTS[0])["input_ids"]
        (embeds,) = llm.apply_model(lambda model: model.embed_input_ids(torch.tensor(ids)).detach().clone())
        (embedded,) = answers(llm, [{"prompt_embeds": embeds}], **SAMPLING)
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert embedded[0] == alone.answers[0][0][0]
    plans = {(p["phase"] == "decode", p["plan"]) for p in records_of(trace)[1:]}
    assert plans == {(False, "w8a8"), (True, "w4a16")}


@pytest.mark.full
def test_long_context(tmp_path: Path) -> None:
    """The prompt has 32,768 tokens: every variant is stock vLLM, and reads what the other wrote."""
    sources = make_pair(tmp_path, max_position_embeddings=LONG + 64)
    merge_checkpoints(sources, tmp_path / "merged")
    prompt = {"prompt_token_ids": [(7 * i) % 251 for i in range(LONG)]}
    options = {"max_model_len": LONG + 32, "max_num_batched_tokens": 4096, "max_num_seqs": 2}
    options |= {"more": ["phase"], "sampling": SAMPLING, "num_gpu_blocks_override": None}
    served = check_variants(tmp_path / "merged", sources, [prompt], **options)
    assert [p["plan"] for p in served[-1].passes] == ["w8a8"] * (LONG // 4096) + ["w4a16"] * (12 - 1)


def test_every_route_gives_the_same_answer(live: Live) -> None:
    """The routes are completions, chat, OpenAI's responses and Anthropic's messages."""
    client, question = live.client(), "What is the capital of Peru?"
    asked: Any = {"model": "tiny", "temperature": 0}
    expected = client.completions.create(prompt=question, max_tokens=12, **asked).choices[0].text
    messages: Any = [{"role": "user", "content": question}]
    chat = client.chat.completions.create(messages=messages, max_tokens=12, **asked)
    responses = client.responses.create(input=question, max_output_tokens=12, **asked)
    body = {"max_tokens": 12, "messages": messages, **asked}
    anthropic: Any = client.post("/messages", body=body, cast_to=object)
    given = chat.choices[0].message.content, responses.output_text, anthropic["content"][0]["text"]
    assert expected and given == (expected,) * 3


def test_an_image_is_refused_and_the_server_goes_on(live: Live) -> None:
    client = live.client()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    messages: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(openai.BadRequestError, match="multimodal"):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices


PREFIX = "The harbour was quiet that morning, and the fishermen mended their nets by the wall. " * 9
CONTINUED = [PREFIX + "At noon the wind", PREFIX + "In the evening the children"]
CACHED = {"enable_prefix_caching": True, "max_num_batched_tokens": 128, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def asked(folder, tmp_path_factory):
    """Return the answers to the second prompt, and their passes, by what the cache held before.

    The cache held ``nothing``; the prefix as ``phase`` writes it (``own``); or as ``w4a16`` does (``other``,
    and ``apart``, where the request has a salt of its own).
    """
    union, found, lengths = conftest.every_plan_of(["phase", "w4a16"]), {}, [1]
    trace = tmp_path_factory.mktemp("caching") / "trace.jsonl"
    with engine(folder / "merged", union, flexquant={"trace": str(trace)}, **CACHED) as llm:
        writers = {"nothing": None, "own": "phase", "other": "w4a16", "apart": "w4a16"}
        for held, writer in writers.items():
            take_policy(llm, writer or "phase")
            if writer:
                answers(llm, CONTINUED[:1])
            take_policy(llm, "phase", empty_cache=False)
            lengths.append(len(records_of(trace)))
            salted = [{"prompt": CONTINUED[1], "cache_salt": "its own"}]
            found[held] = answers(llm, salted if held == "apart" else CONTINUED[1:])
            lengths.append(len(records_of(trace)))
    passes = [records_of(trace)[first:last] for first, last in pairwise(lengths)][1::2]
    return found, dict(zip(found, passes, strict=True))


def test_a_cached_prefix_is_not_prefilled_again(asked):
    _, passes = asked
    tokens = {held: [p["tokens"] for p in taken if p["phase"] == "prefill"] for held, taken in passes.items()}
    prefilled = {held: sum(of_passes) for held, of_passes in tokens.items()}
    assert prefilled["nothing"] > 2 * CACHED["max_num_batched_tokens"], "in several chunks"
    assert prefilled["own"] == prefilled["other"] < prefilled["nothing"] / 2
    assert prefilled["apart"] == prefilled["nothing"]
    for taken in passes.values():
        assert {(p["phase"], p["plan"]) for p in taken} == {("prefill", "w8a8"), ("decode", "w4a16")}


def test_what_a_plan_wrote_another_reads_as_if_it_had_just_been_written(asked):
    """Chunks that end elsewhere round otherwise; keys and values of other weights differ by far more."""
    found, _ = asked
    own, other = (conftest.distance(found["nothing"], found[held]) for held in ("own", "other"))
    print(f"Mean distance in nats from an empty cache's answer: own {own:.4f}, other {other:.4f}")
    assert own < other / 4


def test_a_request_with_a_salt_of_its_own_reads_nothing_that_another_plan_wrote(asked):
    found, _ = asked
    assert found["apart"] == found["nothing"]
