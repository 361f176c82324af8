# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which policy is measured at which batch size, and whose numbers are the same anyway.

A forced row takes one prefill pass and decode passes of one batch size, so its scores depend on the plans
of these two alone: runs with an equal pair share their numbers. (CUDA graphs pad a batch to the next size
captured, and the policy sees the padded size; :class:`Passes` tells if another plan ran than was meant.)

Answers end one by one, so that the batch shrinks: they are the same only if the policies agree on all passes
up to that size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexquant.errors import UsageError
from flexquant.evaluation.subject import Subject
from flexquant.policy.choose import default_name, find_policies
from flexquant.policy.routes import Plan, RouteTable, build_route_table
from flexquant.policy.rules import Policy


@dataclass(frozen=True)
class Candidate:
    name: str
    """In results: a variant, a built-in policy, a file's name, or ``stored``."""
    policy: Policy

    def routes(self, subject: Subject, max_tokens: int, max_sequences: int) -> RouteTable:
        """The route table that serving builds; raises FlexQuantError for a policy that does not fit."""
        return build_route_table(
            self.policy,
            variants=list(subject.checkpoint.merged.variants),
            num_layers=subject.num_layers,
            max_tokens=max_tokens,
            mixable=subject.checkpoint.merged.mixable_groups,
            max_decode_tokens=max_sequences,
        )


def find_candidates(subject: Subject, names: Sequence[str] | None) -> list[Candidate]:
    """Return the policies with the given names, each once.

    None: every variant, and the policy that serving takes by default. A name is a variant of the checkpoint
    (all passes in it), a built-in policy, a policy file, or ``stored``. Raises FlexQuantError for an unknown
    name and two files of one name.
    """
    variants = list(subject.checkpoint.merged.variants)
    if names is None:
        names = [*variants, default_name(subject.checkpoint.merged.policy)]
    if not names:
        raise UsageError("no policy is given; name some, e.g. --policies w8a8,w4a16,phase")
    policies = find_policies(names, variants, subject.folder, subject.checkpoint.merged.policy)
    return [Candidate(name, policy) for name, policy in policies.items()]


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
            key = tuple(routes.intervals("prefill")), tuple(routes.intervals("decode"))
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


@dataclass(frozen=True)
class Passes:
    """Forward passes of a run."""

    by_plan: dict[str, dict[str, int]]
    """Phase -> plan -> number of passes."""
    decode_batch_sizes: dict[int, int]
    """Sequences in a decode pass -> number of passes."""

    @classmethod
    def from_trace(cls, path: Path) -> Passes:
        """Count the passes of a trace file, its first line (what is served) left out."""
        passes = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        by_plan: dict[str, dict[str, int]] = {}
        for (phase, plan), count in sorted(Counter((p["phase"], p["plan"]) for p in passes).items()):
            by_plan.setdefault(phase, {})[plan] = count
        sizes = Counter(p["sequences"] for p in passes if p["phase"] == "decode")
        return cls(by_plan, dict(sorted(sizes.items())))

    def deviations(self, prefill: str, decode: str, batch_size: int, batches: int, tokens: int) -> list[str]:
        """Say what differs from one prefill and ``tokens - 1`` decode passes a batch, in those plans."""
        meant = {"prefill": {prefill: batches}}
        if tokens > 1:
            meant["decode"] = {decode: batches * (tokens - 1)}
        found = []
        for phase in sorted({*meant, *self.by_plan}):
            if self.by_plan.get(phase) != meant.get(phase):
                found.append(
                    f"{phase} passes were {_describe(self.by_plan.get(phase))}, "
                    f"but {_describe(meant.get(phase))} were meant"
                )
        if others := [size for size in self.decode_batch_sizes if size != batch_size]:
            sizes = ", ".join(map(str, others))
            found.append(f"some decode passes had {sizes} sequences instead of {batch_size}")
        return found


def _describe(plans: dict[str, int] | None) -> str:
    return ", ".join(f"{count} of {plan}" for plan, count in plans.items()) if plans else "none"
