# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Greedy answers to real questions, compared with the reference's token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

Answer = list[int]
"""Token ids, the end-of-text token included if the answer ended with it."""


@dataclass(frozen=True)
class Agreement:
    """How far greedy answers follow the reference's."""

    questions: int
    identical: int
    """Answers equal to the reference's, token by token."""
    matched: float
    """Mean share of the reference's answer before the first difference, 0 to 1."""


def batches(prompts: list[list[int]], batch_size: int) -> Iterator[list[list[int]]]:
    for start in range(0, len(prompts), batch_size):
        yield prompts[start : start + batch_size]


def most_tokens(prompts: list[list[int]], batch_size: int) -> int:
    """Return the most tokens that the prompts of one batch have."""
    return max(sum(map(len, batch)) for batch in batches(prompts, batch_size))


def greedy_answers(llm: LLM, prompts: list[list[int]], batch_size: int, answer_tokens: int) -> list[Answer]:
    """Return the model's greedy answer to each prompt, one batch at a time."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=answer_tokens, detokenize=False)
    found = []
    for batch in batches(prompts, batch_size):
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in batch]
        outputs = llm.generate(inputs, parameters, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


def compare_answers(reference: Sequence[Answer], answers: Sequence[Answer]) -> Agreement:
    """Compare the answers to the same questions, in the same order."""
    pairs = list(zip(reference, answers, strict=True))
    shares = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))) / max(1, len(a))
        for a, b in pairs
    ]
    return Agreement(len(pairs), sum(a == b for a, b in pairs), sum(shares) / len(shares))
