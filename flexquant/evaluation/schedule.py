# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Plan the runs, and skip a run whose plans equal those of an earlier one.

A forced row takes one prefill pass and decode passes of one batch size, so its scores depend on the plans of
these passes and the derivations of their variants: runs in which these are equal share their scores. (CUDA
graphs pad a batch to the next captured size, and the policy sees the padded size; :class:`Passes` reports if
another plan ran than was planned.)

Answers end one by one, so they are the same only if the policies agree on all smaller batches too.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Self

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import UsageError
from flexquant.evaluation.inputs import Subject
from flexquant.policy.plans import Plan
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import Policy, default_name, find_policies
from flexquant.policy.schema import Derivation


def find_candidates(subject: Subject, names: Sequence[str] | None) -> dict[str, Policy]:
    """Return the named policies, each once; None: every variant, and serving's default."""
    merged = subject.checkpoint.merged
    if names is None:
        names = [*merged.variants, default_name(merged.policy)]
    if not names:
        raise UsageError("no policy is given; name some, e.g. --policies w8a8,w4a16,phase")
    return find_policies(names, merged.variants, subject.folder, merged.policy)


@dataclass(frozen=True)
class PolicyRun:
    """One policy at one batch size."""

    name: str
    """Name of the policy in results."""
    policy: Policy
    batch_size: int
    routes: RouteTable
    prefill_plan: Plan
    decode_plan: Plan
    same_as: tuple[str, int] | None
    """Earlier run (policy, batch size) with the same plans; None: this run is measured."""
    answers: bool
    """Whether the run answers the questions."""
    answers_same_as: str | None
    """Earlier policy whose answers are the same; None: this run generates answers, if ``answers``."""

    @property
    def needs_engine(self) -> bool:
        return self.same_as is None or (self.answers and self.answers_same_as is None)


def make_schedule(
    candidates: Mapping[str, Policy],
    subject: Subject,
    batch_sizes: Sequence[int],
    prompt_tokens: int,
    questions_tokens: int | None,
) -> list[PolicyRun]:
    """Return every policy at every batch size, answering questions at the first; raise if one does not fit.

    ``prompt_tokens``: of a row; ``questions_tokens``: most in a batch of questions; None: no questions.
    """
    merged = subject.checkpoint.merged
    measured: dict[object, tuple[str, int]] = {}
    answered: dict[object, str] = {}
    runs = []
    for batch_size in batch_sizes:
        answers = questions_tokens is not None and batch_size == batch_sizes[0]
        prompts = batch_size * prompt_tokens
        for name, policy in candidates.items():
            routes = build_route_table(
                policy,
                variants=merged.variants,
                num_layers=subject.num_layers,
                max_tokens=max(prompts, questions_tokens or 0) if answers else prompts,
                mixable=merged.mixable_groups,
                nested=merged.nested,
                max_decode_tokens=batch_size,
            )
            plans = routes.lookup("prefill", prompts), routes.lookup("decode", batch_size)
            intervals = [*routes.intervals("prefill"), *routes.intervals("decode")]
            key = routes.head, tuple(intervals), _derivations(policy, (row.plan for row in intervals))
            passes = routes.head, plans, _derivations(policy, plans)
            same_answers = answered.get(key) if answers else None
            same = measured.get(passes)
            runs.append(PolicyRun(name, policy, batch_size, routes, *plans, same, answers, same_answers))
            measured.setdefault(passes, (name, batch_size))
            if answers:
                answered.setdefault(key, name)
    return runs


def _derivations(policy: Policy, plans: Iterable[Plan]) -> frozenset[tuple[str, Derivation]]:
    """Return how those variants of the plans are derived that are."""
    variants = {variant for plan in plans for variant in plan.variants}
    return frozenset((name, how) for name, how in policy.derived.items() if name in variants)


@dataclass(frozen=True)
class Passes:
    """Counts of a run's forward passes."""

    by_plan: dict[str, dict[str, int]]
    """Phase -> plan -> number of passes."""
    decode_batch_sizes: dict[int, int]
    """Sequences in a decode pass -> number of passes."""

    @classmethod
    def from_trace(cls, path: Path) -> Self:
        """Count the passes in a trace file after its last header line, which describes what is served."""
        lines: list[JsonObject] = [json.loads(line) for line in path.read_text().splitlines()]
        passes = list(takewhile(lambda line: "phase" in line, reversed(lines)))
        by_plan: dict[str, dict[str, int]] = {}
        for (phase, plan), count in sorted(Counter((p["phase"], p["plan"]) for p in passes).items()):
            by_plan.setdefault(phase, {})[plan] = count
        sizes = Counter(p["sequences"] for p in passes if p["phase"] == "decode")
        return cls(by_plan, dict(sorted(sizes.items())))

    def deviations(self, prefill: str, decode: Mapping[str, int], batch_size: int, batches: int) -> list[str]:
        """Describe differences from one prefill pass per batch in ``prefill``, and the ``decode`` counts."""
        meant: dict[str, Mapping[str, int]] = {"prefill": {prefill: batches}}
        if decode:
            meant["decode"] = decode
        found = []
        for phase in sorted({*meant, *self.by_plan}):
            if self.by_plan.get(phase) != meant.get(phase):
                were, expected = (_describe(plans.get(phase)) for plans in (self.by_plan, meant))
                found.append(f"{phase} passes were {were}, but {expected} were meant")
        if others := [size for size in self.decode_batch_sizes if size != batch_size]:
            sizes = ", ".join(map(str, others))
            found.append(f"some decode passes had {sizes} sequences instead of {batch_size}")
        return found


def _describe(plans: Mapping[str, int] | None) -> str:
    return ", ".join(f"{count} of {plan}" for plan, count in plans.items()) if plans else "none"
