# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build the route table of a policy for one model, so that choosing a plan takes one look-up.

The plan of a forward pass is a pure function of its phase and its padded token count, the same on every
rank and for every replay of a CUDA graph. vLLM's front end builds the table; workers get it as plain data
(:meth:`RouteTable.to_json`). Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.plans import Plan
from flexquant.policy.rules import Derivation, LayerRange, Policy, Rule
from flexquant.policy.schema import PHASES, Phase


class Interval(NamedTuple):
    """The passes of ``min_tokens`` to ``max_tokens`` tokens, both included, and their plan."""

    min_tokens: int
    max_tokens: int
    plan: Plan


class RouteTable:
    """Gives every forward pass its plan."""

    def __init__(
        self,
        intervals: Mapping[Phase, Sequence[Interval]],
        derived: dict[str, Derivation],
        tokens_per_sequence: int = 1,
    ) -> None:
        """Take ``intervals`` for every phase, in ascending order and without gaps from one token."""
        self.derived = derived
        """Name -> derivation of a variant that is computed from a checkpoint's variant while loading."""
        self.tokens_per_sequence = tokens_per_sequence
        self._intervals = {phase: tuple(intervals[phase]) for phase in PHASES}
        self._starts = {
            phase: [row.min_tokens for row in rows[1:]] for phase, rows in self._intervals.items()
        }
        rows = [row for phase in PHASES for row in self._intervals[phase]]
        self.plans: tuple[Plan, ...] = tuple(dict.fromkeys(row.plan for row in rows))
        """The plans that some pass can take, in the order of phases and token counts."""

    @classmethod
    def from_json(cls, data: JsonObject) -> RouteTable:
        """Return the table that :meth:`to_json` returned as data."""
        intervals = {
            phase: [
                Interval(first, last, Plan.from_layers(tuple(data["plans"][plan])))
                for first, last, plan in rows
            ]
            for phase, rows in data["intervals"].items()
        }
        derived = {name: Derivation(**how) for name, how in data["derived"].items()}
        return cls(intervals, derived, data["tokens_per_sequence"])

    def to_json(self) -> JsonObject:
        """Return the table as JSON-able data."""
        return {
            "plans": {plan.name: list(plan.layers) for plan in self.plans},
            "intervals": {
                phase: [[row.min_tokens, row.max_tokens, row.plan.name] for row in rows]
                for phase, rows in self._intervals.items()
            },
            "derived": {name: asdict(how) for name, how in self.derived.items()},
            "tokens_per_sequence": self.tokens_per_sequence,
        }

    def up_to(self, max_decode_tokens: int) -> RouteTable:
        """Return the table in which no decode pass has more than ``max_decode_tokens`` padded tokens."""
        rows = self._intervals["decode"]
        decode = [
            row._replace(max_tokens=min(row.max_tokens, max_decode_tokens))
            for row in rows
            if row.min_tokens <= max_decode_tokens
        ]
        return RouteTable({**self._intervals, "decode": decode}, self.derived, self.tokens_per_sequence)

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

    def intervals(self, phase: Phase) -> list[Interval]:
        """Return a phase's token ranges with their plans, ascending; neighbours have different plans."""
        return list(self._intervals[phase])

    def lookup(self, phase: Phase, tokens: int) -> Plan:
        """Return the plan for a pass of ``tokens`` padded tokens; beyond the table's end, its last plan."""
        return self._intervals[phase][bisect_right(self._starts[phase], tokens)].plan

    def reachable(self, tokens: int) -> tuple[Plan, ...]:
        """Return the plans that a pass of ``tokens`` padded tokens can take.

        A prefill pass has more tokens than one decoding sequence; a mixed pass has a decoding sequence more.
        """
        one = self.tokens_per_sequence
        most_in_decode = self._intervals["decode"][-1].max_tokens
        possible = {"prefill": tokens > one, "decode": tokens <= most_in_decode, "mixed": tokens > one + 1}
        return tuple(dict.fromkeys(self.lookup(phase, tokens) for phase in PHASES if possible[phase]))

    def source(self, variant: str) -> str:
        """Return the checkpoint's variant whose weights a variant has: itself, unless it is derived."""
        return self.derived[variant].source if variant in self.derived else variant

    def has_weights(self, variant: str) -> bool:
        """Whether a variant has weights in memory; if not, each pass computes them from its source's."""
        return variant not in self.derived or not self.derived[variant].is_one_copy

    def ignores_phase(self) -> bool:
        """Whether a pass's size alone decides its plan, whatever its phase."""
        starts = {row.min_tokens for rows in self._intervals.values() for row in rows}
        one = self.tokens_per_sequence
        return all(len(self.reachable(tokens)) <= 1 for tokens in {*starts, one + 1, one + 2})


class RouteChange(NamedTuple):
    """A phase's passes of ``min_tokens`` to ``max_tokens`` tokens, ends included, and their plans."""

    phase: Phase
    min_tokens: int
    max_tokens: int
    before: str
    after: str


def route_changes(before: RouteTable, after: RouteTable) -> list[RouteChange]:
    """Return the passes whose plan differs between two tables of one model, by phase and token count.

    Both tables have to end at the same token count, like the tables of one server. Plans are compared by
    name.
    """
    changes: list[RouteChange] = []
    for phase in PHASES:
        old, new = before.intervals(phase), after.intervals(phase)
        starts = sorted({row.min_tokens for row in (*old, *new)})
        for first, following in zip(starts, [*starts[1:], old[-1].max_tokens + 1], strict=True):
            plans = before.lookup(phase, first).name, after.lookup(phase, first).name
            if plans[0] == plans[1]:
                continue
            if changes and changes[-1] == (phase, changes[-1].min_tokens, first - 1, *plans):
                first = changes.pop().min_tokens
            changes.append(RouteChange(phase, first, following - 1, *plans))
    return changes


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

    intervals: dict[Phase, list[Interval]] = {}
    for phase in PHASES:
        rows = intervals[phase] = []
        for first, last, rule in matching_rules(policy, phase, max_tokens, tokens_per_sequence):
            if rows and rows[-1].plan == plans[rule]:
                first = rows.pop().min_tokens
            rows.append(Interval(first, last, plans[rule]))
    table = RouteTable(intervals, policy.derived, tokens_per_sequence)
    return table if max_decode_tokens is None else table.up_to(max_decode_tokens)


def matching_rules(
    policy: Policy, phase: str, max_tokens: int, tokens_per_sequence: int = 1
) -> list[tuple[int, int, Rule]]:
    """Return ``(first, last, rule)``, ascending, for the token counts from 1 to ``max_tokens``."""
    starts = {1}
    for rule in policy.rules:
        starts |= rule.tokens.starts() | rule.batch_size.starts(tokens_per_sequence)
    cuts = sorted(start for start in starts if start <= max_tokens)
    rows: list[tuple[int, int, Rule]] = []
    for first, following in zip(cuts, [*cuts[1:], max_tokens + 1], strict=True):
        batch_size = -(-first // tokens_per_sequence)
        rule = next(rule for rule in policy.rules if rule.matches(phase, first, batch_size))
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
