# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM's users combine with a model, together with plans that change; COMPOSITION.md lists all of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import answers, check_variants, engine, generate, records_of
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
        pattern = "[0-9]{4}-[0-9]{2}"
        constrained = StructuredOutputsParams(regex=pattern)
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
    sources = {
        scheme: make_checkpoint(tmp_path / scheme, scheme=scheme, max_position_embeddings=LONG + 64)
        for scheme in VARIANTS
    }
    merge_checkpoints(sources, tmp_path / "merged")
    prompt = {"prompt_token_ids": [(7 * i) % 251 for i in range(LONG)]}
    options = {"max_model_len": LONG + 32, "max_num_batched_tokens": 4096, "max_num_seqs": 2}
    served = check_variants(
        tmp_path / "merged", sources, [prompt], more=["phase"], sampling=SAMPLING, **options
    )
    assert [p["plan"] for p in served[-1].passes] == ["w8a8"] * (LONG // 4096) + ["w4a16"] * (12 - 1)


@pytest.mark.full
def test_async_llm(folder: Path, alone: Any) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    additional = {"flexquant": {"policy": "phase"}}
    arguments = AsyncEngineArgs(
        str(folder / "merged"), enforce_eager=True, seed=0, additional_config=additional, **OPTIONS
    )

    async def ask() -> list[list[int]]:
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            parameters = SamplingParams(temperature=0, **SAMPLING)

            async def one(number: int, prompt: str) -> list[int]:
                async for output in llm.generate(prompt, parameters, request_id=str(number)):
                    tokens = list(output.outputs[0].token_ids)
                return tokens

            return [await one(number, prompt) for number, prompt in enumerate(PROMPTS)]
        finally:
            llm.shutdown()

    found = asyncio.run(ask())
    (one_by_one,) = generate(
        folder / "merged", ["phase"], *([prompt] for prompt in PROMPTS), sampling=SAMPLING, **OPTIONS
    )
    assert found == [batch[0][0] for batch in one_by_one.answers]


def test_every_route_gives_the_same_answer(live: Live) -> None:
    """The routes are completions, chat, OpenAI's responses and Anthropic's messages."""
    client = live.client()
    question, greedy = "What is the capital of Peru?", {"temperature": 0}
    expected = (
        client.completions.create(model="tiny", prompt=question, max_tokens=12, **greedy).choices[0].text
    )
    messages: Any = [{"role": "user", "content": question}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, **greedy)
    responses = client.responses.create(model="tiny", input=question, max_output_tokens=12, **greedy)
    body = {"model": "tiny", "max_tokens": 12, "messages": messages, **greedy}
    anthropic: Any = client.post("/messages", body=body, cast_to=object)
    assert expected
    assert chat.choices[0].message.content == expected
    assert responses.output_text == expected
    assert anthropic["content"][0]["text"] == expected


def test_an_image_is_refused_and_the_server_goes_on(live: Live) -> None:
    client = live.client()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    messages: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(openai.BadRequestError, match="multimodal"):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices
