# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build the route table of a policy for one model, so that choosing a plan takes one look-up.

The plan of a forward pass is a pure function of its phase and its padded token count, the same on every
rank and for every replay of a CUDA graph. In decode it can also depend on the moment
(:mod:`flexquant.policy.moments`), which is the same on all ranks. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from flexquant.errors import FlexQuantError
from flexquant.policy.moments import CALM, Moment, Span
from flexquant.policy.plans import Plan
from flexquant.policy.ranges import LayerRange
from flexquant.policy.rules import Derivation, Policy, Rule
from flexquant.policy.schema import PHASES, Phase
from flexquant.policy.trigger import Trigger


class Interval(NamedTuple):
    """The passes of ``min_tokens`` to ``max_tokens`` tokens, both included, and their plan."""

    min_tokens: int
    max_tokens: int
    plan: Plan


class PhaseRoutes:
    """The plans of one phase's passes, by span of moments and by token count."""

    def __init__(self, intervals: Mapping[Span, Sequence[Interval]]) -> None:
        self.spans = tuple(intervals)
        self.intervals = tuple(intervals.values())
        """The token counts of each span with their plans, ascending; neighbours have different plans."""
        self._starts = sorted({span.first for span in self.spans})[1:]
        self._states = len({span.unsure for span in self.spans})
        self._routes = [([i.min_tokens for i in rows[1:]], [i.plan for i in rows]) for rows in self.intervals]

    def number(self, moment: Moment) -> int:
        """Return the number of the span that a moment belongs to."""
        states = self._states
        return bisect_right(self._starts, moment.since_prompt) * states + (states > 1 and moment.unsure)

    def lookup(self, tokens: int, moment: Moment) -> Plan:
        starts, plans = self._routes[self.number(moment) if len(self._routes) > 1 else 0]
        return plans[bisect_right(starts, tokens)]


class RouteTable:
    """Gives every forward pass its plan."""

    def __init__(
        self,
        intervals: Mapping[Phase, Mapping[Span, Sequence[Interval]]],
        derived: dict[str, Derivation],
        tokens_per_sequence: int = 1,
        trigger: Trigger | None = None,
    ) -> None:
        """Take ``intervals`` for every phase and span, in ascending order and without gaps from one token."""
        self.derived = derived
        """Name -> derivation of a variant that is computed from a checkpoint's variant while loading."""
        self.trigger = trigger
        """The trigger that makes passes unsure; None if no rule has ``unsure``."""
        self._tokens_per_sequence = tokens_per_sequence
        self._phases = {phase: PhaseRoutes(by_span) for phase, by_span in intervals.items()}
        self.plans: tuple[Plan, ...] = tuple(dict.fromkeys(row.plan for row in self._rows()))
        """The plans that some pass can take, in the order of phases and token counts."""

    def _rows(self) -> Iterator[Interval]:
        for phase in PHASES:
            yield from chain.from_iterable(self._phases[phase].intervals)

    @property
    def layers(self) -> dict[str, frozenset[int]]:
        """Variant -> decoder layers that plans need of it; variants that no plan needs are left out."""
        used: dict[str, set[int]] = {}
        for plan in self.plans:
            for number, variant in enumerate(plan.layers):
                used.setdefault(variant, set()).add(number)
                if not self.has_weights(variant):
                    used.setdefault(self.source(variant), set()).add(number)
        return {variant: frozenset(numbers) for variant, numbers in used.items()}

    @property
    def has_moments(self) -> bool:
        """Whether the plan of a decode pass depends on its moment."""
        return len(self.spans("decode")) > 1

    def spans(self, phase: Phase) -> tuple[Span, ...]:
        """Return the spans that the policy tells apart in a phase; only decode can have more than one."""
        return self._phases[phase].spans

    def moment_name(self, phase: Phase, moment: Moment) -> str:
        """Return the name of the span that a moment belongs to; empty for a span of all moments."""
        routes = self._phases[phase]
        return routes.spans[routes.number(moment)].name

    def lookup(self, phase: Phase, tokens: int, moment: Moment = CALM) -> Plan:
        """Return the plan for a pass of ``tokens`` padded tokens; beyond the table's end, its last plan."""
        return self._phases[phase].lookup(tokens, moment)

    def reachable(self, tokens: int) -> tuple[Plan, ...]:
        """Return the plans that a pass of ``tokens`` padded tokens can take, at any moment.

        A prefill pass has more tokens than one decoding sequence; a mixed pass has a decoding sequence more.
        """
        one = self._tokens_per_sequence
        most_in_decode = self._phases["decode"].intervals[0][-1].max_tokens
        possible = {"prefill": tokens > one, "decode": tokens <= most_in_decode, "mixed": tokens > one + 1}
        return tuple(
            dict.fromkeys(
                self.lookup(phase, tokens, span.moment)
                for phase in PHASES
                if possible[phase]
                for span in self.spans(phase)
            )
        )

    def source(self, variant: str) -> str:
        """Return the checkpoint's variant whose weights a variant has: itself, unless it is derived."""
        return self.derived[variant].source if variant in self.derived else variant

    def has_weights(self, variant: str) -> bool:
        """Whether a variant has weights in memory; if not, each pass computes them from its source's."""
        return variant not in self.derived or not self.derived[variant].is_one_copy

    def ignores_phase(self) -> bool:
        """Whether a pass's size alone decides its plan, whatever its phase and moment."""
        starts = {row.min_tokens for row in self._rows()}
        one = self._tokens_per_sequence
        return all(len(self.reachable(tokens)) <= 1 for tokens in {*starts, one + 1, one + 2})

    def intervals(self, phase: Phase, moment: Moment = CALM) -> list[Interval]:
        """Return a phase's token ranges with their plans, ascending; neighbours have different plans."""
        routes = self._phases[phase]
        return list(routes.intervals[routes.number(moment)])


def build_route_table(
    policy: Policy,
    variants: Collection[str],
    num_layers: int,
    max_tokens: int,
    mixable: Collection[Collection[str]] | None = None,
    tokens_per_sequence: int = 1,
    max_decode_tokens: int | None = None,
) -> RouteTable:
    """Build the route table of a policy for a model of ``num_layers`` decoder layers.

    ``max_tokens`` is the largest number of tokens in a pass, ``max_decode_tokens`` in a decode pass, padding
    included. A decode pass has ``tokens_per_sequence`` tokens per sequence, more than one only with
    speculative decoding; its batch size is its token count divided by that, rounded up.

    ``variants`` are the checkpoint's variants; the policy can derive more. ``mixable`` are groups of variants
    whose layers one plan can mix, where a derived variant counts as its source; None: all can be mixed.

    Raises :class:`FlexQuantError` for a variant that does not exist, a layer that the model does not have or
    that is named twice, and a plan with layers of variants in different groups of ``mixable``.
    """
    variants = [*variants, *_derived(policy, variants)]
    plans = {}
    for rule in policy.rules:
        plan = _plan(rule, variants, num_layers)
        if mixable is not None:
            _check_mixable(rule, plan, policy, mixable)
        plans[rule] = plan

    intervals: dict[Phase, dict[Span, list[Interval]]] = {}
    for phase in PHASES:
        limit = max_tokens
        if phase == "decode" and max_decode_tokens is not None:
            limit = min(limit, max_decode_tokens)
        intervals[phase] = {
            span: _intervals(matching_rules(policy, phase, limit, tokens_per_sequence, span.moment), plans)
            for span in policy.spans(phase)
        }
    return RouteTable(intervals, policy.derived, tokens_per_sequence, policy.trigger)


def _intervals(matching: list[tuple[int, int, Rule]], plans: Mapping[Rule, Plan]) -> list[Interval]:
    rows: list[Interval] = []
    for first, last, rule in matching:
        if rows and rows[-1].plan == plans[rule]:
            first = rows.pop().min_tokens
        rows.append(Interval(first, last, plans[rule]))
    return rows


def matching_rules(
    policy: Policy, phase: str, max_tokens: int, tokens_per_sequence: int = 1, moment: Moment = CALM
) -> list[tuple[int, int, Rule]]:
    """Return ``(first, last, rule)``, ascending, for the token counts from 1 to ``max_tokens``."""
    starts = {1}
    for rule in policy.rules:
        starts |= rule.tokens.starts() | rule.batch_size.starts(tokens_per_sequence)
    cuts = sorted(start for start in starts if start <= max_tokens)
    rows: list[tuple[int, int, Rule]] = []
    for first, following in zip(cuts, [*cuts[1:], max_tokens + 1], strict=True):
        batch_size = -(-first // tokens_per_sequence)
        rule = next(rule for rule in policy.rules if rule.matches(phase, first, batch_size, moment))
        if rows and rows[-1][2] is rule:
            first = rows.pop()[0]
        rows.append((first, following - 1, rule))
    return rows


def _check_mixable(rule: Rule, plan: Plan, policy: Policy, mixable: Collection[Collection[str]]) -> None:
    stored = {v: policy.derived[v].source if v in policy.derived else v for v in plan.variants}
    if any(set(stored.values()) <= set(group) for group in mixable):
        return
    groups = [" with ".join(group) for group in mixable if len(group) > 1]
    advice = f"mix {' or '.join(groups)} only, or use" if groups else "use"
    raise FlexQuantError(
        f"{rule.place} begins a plan with layers of {' and '.join(plan.variants)} ({plan.name}), but the "
        f"residual streams of these variants differ; {advice} a policy without 'layers'"
    )


def _derived(policy: Policy, variants: Collection[str]) -> list[str]:
    for name, derivation in policy.derived.items():
        if name in variants:
            raise FlexQuantError(
                f"{derivation.place} derives '{name}', but the checkpoint has a variant of that name; use "
                "it as it is, or derive under another name"
            )
        if derivation.source not in variants:
            raise FlexQuantError(
                f"{derivation.place} derives '{name}' from '{derivation.source}', but the checkpoint has "
                f"{', '.join(sorted(variants))}; derive from one of those, or choose another policy"
            )
    return list(policy.derived)


def _plan(rule: Rule, variants: Collection[str], num_layers: int) -> Plan:
    choices = [(rule.variant, rule.place), *((layers.variant, layers.place) for layers in rule.layers)]
    for variant, place in choices:
        if variant not in variants:
            raise FlexQuantError(
                f"{place} names the variant '{variant}', but the checkpoint has "
                f"{', '.join(sorted(variants))}; use one of those, choose another "
                "policy, or merge a checkpoint with that variant"
            )
    chosen: dict[int, LayerRange] = {}
    for layers in rule.layers:
        for layer in _resolve(layers, num_layers):
            if layer in chosen:
                raise FlexQuantError(
                    f'{layers.place} overlaps "{chosen[layer].text}": both name layer {layer} of this '
                    f"model's {num_layers} layers; name every layer once"
                )
            chosen[layer] = layers
    return Plan.from_layers(
        tuple(chosen[i].variant if i in chosen else rule.variant for i in range(num_layers))
    )


def _resolve(layers: LayerRange, num_layers: int) -> range:
    for layer in (layers.first, layers.last):
        if not -num_layers <= layer < num_layers:
            raise FlexQuantError(
                f"{layers.place} names layer {layer}, but the model has {num_layers} layers; use 0 to "
                f"{num_layers - 1}, or -{num_layers} to -1 counted from the end"
            )
    first, last = layers.first % num_layers, layers.last % num_layers
    if first > last:
        raise FlexQuantError(
            f"{layers.place} runs from layer {first} back to {last} of this model's {num_layers} layers; "
            "put the earlier layer first"
        )
    return range(first, last + 1)
