# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which policy is measured at which batch size, and whose numbers are the same anyway.

A forced row takes one prefill pass and decode passes of one batch size, so its scores depend on the plans
of these two alone: runs with an equal pair share their numbers. (CUDA graphs pad a batch to the next size
captured, and the policy sees the padded size; `passes` tells if another plan ran than was meant.) Answers
end one by one, so that the batch shrinks: they are the same only if the policies agree on all passes up to
that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexquant.evaluation.candidates import Candidate
from flexquant.evaluation.subject import Subject
from flexquant.routes import Plan, RouteTable


@dataclass(frozen=True)
class Run:
    """One policy at one batch size."""

    candidate: Candidate
    batch_size: int
    routes: RouteTable
    prefill_plan: Plan
    decode_plan: Plan
    same_as: tuple[str, int] | None
    """The earlier run (policy, batch size) with the same two plans; None: this one is measured."""
    answers: bool
    """Whether it answers the questions."""
    answers_same_as: str | None
    """The earlier policy whose answers are the same; None: these are generated, if ``answers``."""

    @property
    def needs_engine(self) -> bool:
        return self.same_as is None or (self.answers and self.answers_same_as is None)


def make_schedule(
    candidates: Sequence[Candidate],
    subject: Subject,
    batch_sizes: Sequence[int],
    prompt_tokens: int,
    questions_tokens: int | None,
) -> list[Run]:
    """Return every policy at every batch size, the smallest (which also answers the questions) first.

    ``prompt_tokens`` are those of one row; ``questions_tokens`` the most in one batch of questions, None
    without questions. Raises FlexQuantError for a policy that does not fit the checkpoint.
    """
    measured: dict[tuple[Plan, Plan], tuple[str, int]] = {}
    answered: dict[object, str] = {}
    runs = []
    for batch_size in batch_sizes:
        answers = questions_tokens is not None and batch_size == batch_sizes[0]
        prompts = batch_size * prompt_tokens
        for candidate in candidates:
            most = max(prompts, questions_tokens or 0) if answers else prompts
            routes = candidate.routes(subject, most, batch_size)
            pair = routes.lookup("prefill", prompts), routes.lookup("decode", batch_size)
            key = tuple(tuple(routes.intervals(phase)) for phase in ("prefill", "decode"))
            runs.append(
                Run(
                    candidate,
                    batch_size,
                    routes,
                    *pair,
                    same_as=measured.get(pair),
                    answers=answers,
                    answers_same_as=answered.get(key) if answers else None,
                )
            )
            measured.setdefault(pair, (candidate.name, batch_size))
            if answers:
                answered.setdefault(key, candidate.name)
    return runs
