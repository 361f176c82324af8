# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run a search: measure each layer alone, propose plans, measure these whole, and choose one.

The choice is a policy of its own, or limits what a tuned policy loses.

The gain of several layers together is not the sum of their gains alone. So the plans from the lowest
precision to the highest, each with one layer raised beyond the plan before, are proposals that are measured.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from flexquant.errors import FlexQuantError, UsageError
from flexquant.layers.sensitivity import Study, StudyDocument, measure_plans
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.plans import Layers, Plan, all_in, describe_layers, with_layer
from flexquant.policy.rules import parse_policy, with_derivations
from flexquant.tuning.objectives import Decision, Range
from flexquant.tuning.policy_file import TuningResult, rules_of

LAST = 3
"""Proposed plans to measure, those that raise most within the budget; raising more is not always better."""
BESIDE = 2
"""Number of following steps that are tried in place of a plan's last step."""


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan, its mean KL divergence to the reference in nats a token, and its decode pass in seconds."""

    layers: Layers
    kl: float
    seconds: float


@dataclass(frozen=True)
class Budget:
    """A limit for plans, in one of the fields. Raises :class:`UsageError` for one below 0."""

    max_kl: float | None = None
    """Largest KL divergence, in nats a token; the fastest plan within it is chosen."""
    max_slowdown: float | None = None
    """Largest slowdown against the fastest variant (0.1 = 10 %); the plan with the least KL is chosen."""
    layers: int | None = None
    """Exact number of layers above the lowest precision; the plan with the least KL is chosen."""

    def __post_init__(self) -> None:
        (given,) = (value for value in (self.max_kl, self.max_slowdown, self.layers) if value is not None)
        if given < 0:
            raise UsageError(f"the budget is {given:g}; give 0 or more")

    def __str__(self) -> str:
        if self.max_kl is not None:
            return f"at most {self.max_kl:g} nats a token"
        if self.max_slowdown is not None:
            return f"at most {100 * self.max_slowdown:g} % slower than the fastest variant"
        return f"{self.layers} layers raised"

    def allows(self, raised: int, slowdown: float) -> bool:
        """Whether a plan with ``raised`` layers above the lowest, and this slowdown, is worth measuring."""
        if self.layers is not None:
            return raised == self.layers
        return self.max_slowdown is None or slowdown <= self.max_slowdown

    def choose(self, plans: Sequence[MeasuredPlan]) -> MeasuredPlan:
        """Return the best plan within the budget; raise FlexQuantError, naming the nearest, if none is."""
        if self.max_kl is None:
            return min(plans, key=lambda plan: (plan.kl, plan.seconds))
        kept = [plan for plan in plans if plan.kl <= self.max_kl]
        if not kept:
            nearest = min(plans, key=lambda plan: plan.kl)
            loses = f"{describe_layers(nearest.layers)}, loses {nearest.kl:.3g}"
            advice = "allow that with --max-kl, or add a more precise variant"
            problem = f"no plan loses at most {self.max_kl:g} nats a token"
            raise FlexQuantError(f"{problem}; the nearest, {loses}: {advice}")
        return min(kept, key=lambda plan: (plan.seconds, plan.kl))


def front(plans: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """Return the Pareto front, the fastest plan first: plans to which no other is both faster and better."""
    found: list[MeasuredPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.kl)):
        if not found or plan.kl < found[-1].kl:
            found.append(plan)
    return found


@dataclass(frozen=True)
class SearchResult:
    document: StudyDocument
    """The study's document, with every measured plan."""
    chosen: MeasuredPlan
    searched: list[MeasuredPlan]
    """The variants alone, the plans with one layer below the highest precision, and the proposed plans."""


@dataclass(frozen=True)
class Search:
    """A search for the best plan for decode passes under a budget."""

    study: Study
    times: PassTimes
    """Times of every variant, measured by `flexquant tune`."""
    budget: Budget
    sequences: int = 1
    """Sequences in the decode pass whose time counts."""

    def __post_init__(self) -> None:
        number, raised = self.study.subject.num_layers, self.budget.layers
        if raised is not None and raised > number:
            raise UsageError(f"the model has {number} layers, not {raised}; give --layers up to that")
        missing = [variant for variant in self.study.variants if variant not in self.times.variants]
        if missing:
            problem = f"the policy has times of {', '.join(self.times.variants)}, not of {', '.join(missing)}"
            raise FlexQuantError(f"{problem}; give one that 'flexquant tune' wrote for these variants")

    def run(self, file: Path, *, overwrite: bool, progress: Callable[[str], None]) -> SearchResult:
        """Measure what ``file`` lacks, and choose a plan; raise FlexQuantError if the budget allows none."""
        with self.study.measuring(file, overwrite=overwrite, progress=progress) as (document, measure):

            def measured(plan: Layers) -> MeasuredPlan:
                return MeasuredPlan(plan, fmean(measure(plan)), self._seconds(plan))

            pure = self.study.alone()
            highest = pure[0]
            if self.budget.max_kl is not None:
                fastest = min(map(measured, pure), key=lambda plan: plan.seconds)
                if fastest.kl <= self.budget.max_kl:
                    return SearchResult(document, fastest, [*map(measured, pure)])
            alone = [*pure, *self.study.leaving(self.study.highest)]
            measure_plans(alone, document, measure, progress)

            def cost(layer: int, variant: str) -> float:
                return fmean(measure(with_layer(highest, layer, variant))) - fmean(measure(highest))

            chain = greedy_chain(cost, {plan[0]: self._seconds(plan) for plan in pure}, len(highest))
            progress("whole plans")
            if (most := self.budget.max_kl) is not None:
                first = bisect_left(chain[:-1], True, key=lambda plan: fmean(measure(plan)) <= most)
                proposed = chain[max(0, first - 1) : first + 2]
            else:
                proposed = list(filter(self._allowed, chain))[-LAST:]
                proposed += filter(self._allowed, [*beside(chain, proposed[-1], BESIDE)] if proposed else [])
            plans = [measured(plan) for plan in dict.fromkeys((*alone, *proposed))]
            chosen = self.budget.choose([plan for plan in plans if self._allowed(plan.layers)])
        return SearchResult(document, chosen, plans)

    def _allowed(self, plan: Layers) -> bool:
        fastest, (*_, lowest) = min(map(self._seconds, self.study.alone())), self.study.variants
        raised = sum(variant != lowest for variant in plan)
        return self.budget.allows(raised, self._seconds(plan) / fastest - 1)

    def _seconds(self, plan: Layers) -> float:
        return self.times.seconds(plan, "decode", self.sequences)


def greedy_chain(
    costs: Callable[[int, str], float], seconds: Mapping[str, float], num_layers: int
) -> list[Layers]:
    """Return plans from all layers in the last variant of ``seconds`` to all in the first.

    Each step raises the layer, and to the variant, that gains most for its time. ``costs(layer, variant)`` is
    the KL divergence that the layer costs in that variant with all others in the first, so that no errors
    interact. ``seconds``: variant, the most precise first -> time of a decode pass.
    """
    variants = list(seconds)
    plan = all_in(variants[-1], num_layers)
    chain = [plan]

    def worth(layer: int, variant: str) -> tuple[bool, float]:
        before = plan[layer]
        won = costs(layer, before) - (0.0 if variant == variants[0] else costs(layer, variant))
        longer = (seconds[variant] - seconds[before]) / num_layers
        # Every step that gains comes before every step that loses, even if the latter saves time.
        return won > 0, won / longer if longer > 0 else math.copysign(math.inf, won)

    while any(variant != variants[0] for variant in plan):
        higher = ((layer, variants[: variants.index(before)]) for layer, before in enumerate(plan))
        steps = [(layer, variant) for layer, above in higher for variant in above]
        layer, variant = max(steps, key=lambda step: (*worth(*step), -step[0]))
        plan = with_layer(plan, layer, variant)
        chain.append(plan)
    return chain


def beside(chain: Sequence[Layers], plan: Layers, steps: int) -> Iterator[Layers]:
    """Yield ``plan`` with its last step replaced by each of the ``steps`` steps that follow in the chain."""
    place = chain.index(plan)
    for before, after in pairwise(chain[place : place + steps + 1]):
        ((layer, variant),) = ((n, v) for n, v in enumerate(after) if v != before[n])
        yield with_layer(chain[max(0, place - 1)], layer, variant)


FASTEST_PLAN = "that plan"  # which a sentence above the table of times names


def limit_loss(
    tuned: TuningResult,
    study: Study,
    most: float,
    file: Path,
    *,
    overwrite: bool,
    progress: Callable[[str], None],
) -> TuningResult:
    """Return the tuned policy with other plans in the rules whose variant loses more than ``most``.

    A loss is the KL divergence of decode to the study's reference, in nats a token. Such a decode rule takes
    the fastest plan within the limit, which can mix variants; any other such rule takes the most precise
    variant. ``file`` keeps the measurements. Raises FlexQuantError if no plan loses so little.
    """
    found = Search(study, tuned.times, Budget(max_kl=most)).run(file, overwrite=overwrite, progress=progress)
    number, kl = study.subject.num_layers, found.document["kl"]
    losses = {variant: fmean(kl[describe_layers(all_in(variant, number))]) for variant in study.variants}
    plan = found.chosen

    def limited(phase: str, r: Range) -> Range:
        other = FASTEST_PLAN if phase == "decode" else study.highest
        return r if losses[r.variant] <= most else replace(r, variant=other)

    decision = Decision({p: tuple(limited(p, r) for r in of) for p, of in tuned.decision.ranges.items()})
    uses = {**{v: v for v in losses}, FASTEST_PLAN: Plan.from_layers(plan.layers).rule_use()}
    document = {**tuned.document, "rules": rules_of(decision, uses)}
    document = with_derivations(document, study.variants.values())
    told = ", ".join(f"{variant} {loss:.3g}" for variant, loss in losses.items())
    of, name = found.document["reference"] or f"{study.highest} itself", describe_layers(plan.layers)
    notes = [
        f"KL divergence of decode to {of} on {study.text.name}, nats a token: {told}.",
        f"At most {most:g} is allowed: the fastest plan, {name}, loses {plan.kl:.3g}.",
    ]
    if decision != tuned.decision:
        kept = [n for n in tuned.notes if " is never chosen" not in n and " is kept up to" not in n]
        tuned = replace(tuned, notes=kept)
        document["description"] += f"; where that loses more than {most:g} nats a token, another plan"
    parse_policy(document, "the tuned policy")
    return replace(tuned, document=document, decision=decision, notes=[*tuned.notes, *notes])
