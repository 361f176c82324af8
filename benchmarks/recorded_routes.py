# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Answers that a server gave in batches, computed again one by one, each token by its recorded plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexquant.measuring.engine import engine, take_policy
from flexquant.policy.schema import SCHEMA

LIKELIEST = 10
"""Number of likeliest tokens among which the recorded token is looked for, where two answers part."""


@dataclass(frozen=True)
class Answer:
    """What a server answered to a prompt."""

    prompt: str
    text: str
    tokens: int
    """Number of tokens of the text."""
    passes: list[tuple[str, int]]
    """The plan of each pass that the request was in, in order, and how many of its tokens that computed."""


def compare_answers(
    model: Path, answers: Sequence[Answer], plans: dict[str, list[str]], max_length: int
) -> dict[str, Any]:
    """Compute answers again, and return how many are equal.

    ``plans``: name -> the variant of each layer. ``gaps`` are in nats: how much likelier, at the first
    difference, the token computed here is than the recorded one; null if that is not among the ten likeliest.
    Answers to prompts that were split between passes of different plans are left out.
    """
    gaps: list[float | None] = []
    equal = 0
    whole = [answer for answer in answers if prompt_plan(answer) is not None]
    with engine(
        model,
        flexquant={"policy": "phase"},
        max_model_len=max_length,
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
    ) as llm:
        documents = {name: {"schema": SCHEMA, "rules": [{"use": use(v)}]} for name, v in plans.items()}
        for answer in whole:
            gap = first_gap(llm, answer, documents)
            equal += gap == 0
            if gap != 0:
                gaps.append(None if math.isinf(gap) else gap)
    return {
        "compared": len(whole),
        "left_out": len(answers) - len(whole),
        "equal": equal,
        "gaps": sorted(gaps, key=lambda gap: math.inf if gap is None else gap),
    }


def use(layers: Sequence[str]) -> Any:
    """Return the value of a rule's ``use`` that makes a plan."""
    default = layers[0]
    others = {str(i): variant for i, variant in enumerate(layers) if variant != default}
    return {"default": default, "layers": others} if others else default


def prompt_plan(answer: Answer) -> str | None:
    """Return the plan that computed the prompt; None if several did."""
    plans = {plan for plan, _ in answer.passes[: len(answer.passes) - answer.tokens + 1]}
    return next(iter(plans)) if len(plans) == 1 else None


def first_gap(llm: Any, answer: Answer, documents: dict[str, dict[str, Any]]) -> float:
    """Return 0 if an answer is equal when computed again, else the gap in nats, infinite if unexplained."""
    from vllm import SamplingParams

    decodes = answer.passes[len(answer.passes) - answer.tokens + 1 :]
    plans = [prompt_plan(answer), *(plan for plan, _ in decodes)]
    parameters = SamplingParams(
        temperature=0, max_tokens=len(plans), ignore_eos=True, logprobs=LIKELIEST, detokenize=True
    )
    llm.llm_engine.add_request("again", answer.prompt, parameters)
    before = None
    output: Any = None
    for plan in plans:
        if plan != before:
            take_policy(llm, plan, documents[plan])
            before = plan
        (output,) = llm.llm_engine.step()
    assert output.finished, "as many passes as tokens"
    found = output.outputs[0]
    if found.text == answer.text:
        return 0.0
    tokenizer = llm.get_tokenizer()
    for step, likeliest in enumerate(found.logprobs):
        if not answer.text.startswith(
            tokenizer.decode(found.token_ids[: step + 1], skip_special_tokens=True)
        ):
            for token, entry in likeliest.items():
                text = tokenizer.decode([*found.token_ids[:step], token], skip_special_tokens=True)
                if token != found.token_ids[step] and answer.text.startswith(text):
                    return likeliest[found.token_ids[step]].logprob - entry.logprob
            return math.inf
    return math.inf
