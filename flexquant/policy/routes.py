# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build the route table of a policy for one model, so that choosing a plan takes one look-up.

The plan of a forward pass is a pure function of its phase and its padded token count, the same on every
rank and for every replay of a CUDA graph. vLLM's front end builds the table (:func:`build_route_table`) from
the plan of each rule; workers get it as plain data (:meth:`RouteTable.to_json`).
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Self, TypedDict, TypeVar

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import BytesByRange, bytes_in_use
from flexquant.documents.yaml_document import KeyPath
from flexquant.errors import FlexQuantError
from flexquant.policy.plans import Layers, Plan
from flexquant.policy.rules import Policy, source_of
from flexquant.policy.schema import PHASES, Derivation, Head, Phase, parse_layers

T = TypeVar("T")


class Interval(NamedTuple):
    """The passes of ``min_tokens`` to ``max_tokens`` tokens, both included, and their plan."""

    min_tokens: int
    max_tokens: int
    plan: Plan

    def to_data(self) -> JsonObject:
        return {**self._asdict(), "plan": self.plan.name}


class RouteTableData(TypedDict):
    """A :class:`RouteTable` as plain data, from the front end to the workers."""

    plans: dict[str, list[str]]
    """Plan -> the variant of every decoder layer."""
    intervals: dict[Phase, list[tuple[int, int, str]]]
    """Phase -> first and last number of tokens, and the plan's name."""
    derived: dict[str, JsonObject]
    nested: dict[str, str]
    tokens_per_sequence: int
    head: Head


class RouteTable:
    """Gives every forward pass its plan."""

    def __init__(
        self,
        intervals: Mapping[Phase, Sequence[Interval]],
        derived: Mapping[str, Derivation],
        nested: Mapping[str, str] | None = None,
        tokens_per_sequence: int = 1,
        head: Head = "stored",
    ) -> None:
        """Take ``intervals`` for every phase, in ascending order and without gaps from one token."""
        self.derived = derived
        """Name -> derivation of a variant that is computed from a checkpoint's variant."""
        self.nested = nested or {}
        """Variant that holds differences alone -> the variant whose weights they are added to."""
        self.tokens_per_sequence = tokens_per_sequence
        self.head = head
        """Precision of the lm_head: as the checkpoint stores it, or INT8."""
        self._intervals = {phase: tuple(intervals[phase]) for phase in PHASES}
        rows = [row for phase in PHASES for row in self._intervals[phase]]
        self.plans: tuple[Plan, ...] = tuple(dict.fromkeys(row.plan for row in rows))
        """The plans that some pass can take, in the order of phases and token counts."""

    @classmethod
    def from_json(cls, data: RouteTableData) -> Self:
        plans = {name: Plan.from_layers(tuple(layers)) for name, layers in data["plans"].items()}
        found = data["intervals"]
        intervals = {name: [Interval(a, b, plans[plan]) for a, b, plan in found[name]] for name in found}
        derived = {name: Derivation.model_validate(how) for name, how in data["derived"].items()}
        return cls(intervals, derived, data["nested"], data["tokens_per_sequence"], data["head"])

    def to_json(self) -> RouteTableData:
        found = self._intervals.items()
        return {
            "plans": self.layers_by_plan(),
            "intervals": {phase: [(*row[:2], row.plan.name) for row in rows] for phase, rows in found},
            "derived": {name: how.model_dump(by_alias=True) for name, how in self.derived.items()},
            "nested": dict(self.nested),
            "tokens_per_sequence": self.tokens_per_sequence,
            "head": self.head,
        }

    def layers_by_plan(self) -> dict[str, list[str]]:
        """Return name of a plan -> the variant of every decoder layer."""
        return {plan.name: list(plan.layers) for plan in self.plans}

    def up_to(self, max_decode_tokens: int) -> "RouteTable":
        """Return the table in which no decode pass has more than ``max_decode_tokens`` padded tokens."""
        rows = [row for row in self._intervals["decode"] if row.min_tokens <= max_decode_tokens]
        decode = [row._replace(max_tokens=min(row.max_tokens, max_decode_tokens)) for row in rows]
        intervals = {**self._intervals, "decode": decode}
        return RouteTable(intervals, self.derived, self.nested, self.tokens_per_sequence, self.head)

    @property
    def layers(self) -> dict[str, frozenset[int]]:
        """Variant -> decoder layers that plans need of it; variants that no plan needs are left out."""
        return self.layers_of(self.plans)

    def layers_of(self, plans: Iterable[Plan]) -> dict[str, frozenset[int]]:
        """Return the same for some of the table's plans."""
        used: dict[str, set[int]] = {}
        for plan in plans:
            for number, variant in enumerate(plan.layers):
                of = None if self.has_weights(variant) else self.source(variant)
                for needed in filter(None, (variant, of, self.nested.get(variant))):
                    used.setdefault(needed, set()).add(number)
        return {variant: frozenset(numbers) for variant, numbers in used.items()}

    def intervals(self, phase: Phase) -> list[Interval]:
        """Return a phase's token ranges with their plans, ascending; neighbours have different plans."""
        return list(self._intervals[phase])

    def lookup(self, phase: Phase, tokens: int) -> Plan:
        """Return the plan for a pass of ``tokens`` padded tokens; beyond the table's end, its last plan."""
        rows = self._intervals[phase]
        return rows[bisect_right(rows, tokens, lo=1, key=itemgetter(0)) - 1].plan

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
        return source_of(variant, self.derived)

    def has_weights(self, variant: str) -> bool:
        """Whether a variant has weights in memory; if not, each pass computes them from its source's."""
        return variant not in self.derived or not self.derived[variant].is_one_copy

    def stored_bytes(self, checkpoint: MergedCheckpoint, plans: Iterable[Plan]) -> BytesByRange:
        """Return the stored bytes of what some of the table's plans need in memory."""
        held = {name: numbers for name, numbers in self.layers_of(plans).items() if self.has_weights(name)}
        sources = {name: derivation.source for name, derivation in self.derived.items()}
        return bytes_in_use(checkpoint.merged, checkpoint.tensors, held, sources)

    def ignores_phase(self) -> bool:
        """Whether a pass's size alone decides its plan, whatever its phase."""
        starts = {row.min_tokens for rows in self._intervals.values() for row in rows}
        one = self.tokens_per_sequence
        return all(len(self.reachable(tokens)) <= 1 for tokens in {*starts, one + 1, one + 2})


@dataclass(frozen=True)
class RouteChange:
    """A phase's passes of ``min_tokens`` to ``max_tokens`` tokens, ends included, and their plans."""

    phase: Phase
    min_tokens: int
    max_tokens: int
    before: str
    after: str


def route_changes(before: RouteTable, after: RouteTable) -> list[RouteChange]:
    """Return the passes whose plan differs, by its name, between two tables of one server."""
    changes: list[RouteChange] = []
    for phase in PHASES:
        rows = [*before.intervals(phase), *after.intervals(phase)]
        starts = [row.min_tokens for row in rows]
        plans = {n: (before.lookup(phase, n).name, after.lookup(phase, n).name) for n in starts}
        for first, last, (old, new) in _ranges(plans, rows[-1].max_tokens):
            if old != new:
                changes.append(RouteChange(phase, first, last, old, new))
    return changes


def build_route_table(
    policy: Policy,
    variants: Collection[str],
    num_layers: int,
    max_tokens: int,
    mixable: Collection[Collection[str]] | None = None,
    nested: Mapping[str, str] | None = None,
    tokens_per_sequence: int = 1,
    max_decode_tokens: int | None = None,
    head: Head | None = None,
) -> RouteTable:
    """Build the route table of a policy for a model of ``num_layers`` decoder layers.

    ``max_tokens`` is the largest number of tokens in a pass, ``max_decode_tokens`` in a decode pass, padding
    included. A decode pass has ``tokens_per_sequence`` tokens a sequence; its batch size is rounded up.
    ``variants`` are the checkpoint's; the policy can derive more. ``mixable`` are groups of variants whose
    layers one plan can mix, where a derived variant counts as its source; None: all can be mixed. ``nested``
    is that of :class:`RouteTable`. ``head`` is the precision of the lm_head; None: the policy's.

    Raises :class:`FlexQuantError` for a variant or layer that does not exist, a layer that is named twice,
    and a plan with layers of variants in different groups of ``mixable``.
    """
    _check_derived(policy, variants)
    known = [*variants, *policy.derived]
    plans: list[Plan] = []
    for number in range(len(policy.rules)):
        plans.append(Plan.from_layers(_layers(policy, number, known, num_layers)))
        _check_mixable(policy, number, plans[-1], mixable)
    rows = {phase: match_rules(policy, plans, phase, max_tokens, tokens_per_sequence) for phase in PHASES}
    intervals = {phase: [Interval(*row) for row in found] for phase, found in rows.items()}
    table = RouteTable(intervals, policy.derived, nested, tokens_per_sequence, head or policy.head)
    return table if max_decode_tokens is None else table.up_to(max_decode_tokens)


def match_rules(
    policy: Policy, plans: Sequence[T], phase: Phase, max_tokens: int, tokens_per_sequence: int = 1
) -> list[tuple[int, int, T]]:
    """Return ``(first, last, plan)``, ascending, neighbours unequal, for 1 to ``max_tokens`` tokens."""
    starts = {1}
    for rule in policy.rules:
        starts |= rule.when.tokens.starts() | rule.when.batch_size.starts(tokens_per_sequence)
    found = {}
    for first in starts:
        batch_size = -(-first // tokens_per_sequence)
        rules = zip(policy.rules, plans, strict=True)
        found[first] = next(plan for rule, plan in rules if rule.matches(phase, first, batch_size))
    return _ranges(found, max_tokens)


def _ranges(values: Mapping[int, T], end: int) -> list[tuple[int, int, T]]:
    """Return ``(first, last, value)`` up to ``end``, by the values from each number on; equal ones join."""
    starts: list[int] = []
    for number in sorted(values):
        if number <= end and not (starts and values[starts[-1]] == values[number]):
            starts.append(number)
    lasts = [*(start - 1 for start in starts[1:]), end]
    return [(first, last, values[first]) for first, last in zip(starts, lasts, strict=True)]


def _check_derived(policy: Policy, variants: Collection[str]) -> None:
    for name, derivation in policy.derived.items():
        derives = f"{policy.place(('derive', name))} derives '{name}'"
        if name in variants:
            problem = f"{derives}, but the checkpoint has a variant of that name"
            raise FlexQuantError(f"{problem}; use it as it is, or derive under another name")
        if derivation.source not in variants:
            there = f"the checkpoint has {', '.join(sorted(variants))}"
            advice = "derive from one of those, or choose another policy"
            raise FlexQuantError(f"{derives} from '{derivation.source}', but {there}; {advice}")


def _use(policy: Policy, number: int) -> KeyPath:
    """Return the path of the variant of most layers, in the rule with this number."""
    return ("rules", number, "use", *(["default"] if policy.rules[number].layers else []))


def _check_mixable(
    policy: Policy, number: int, plan: Plan, mixable: Collection[Collection[str]] | None
) -> None:
    stored = {source_of(v, policy.derived) for v in plan.variants}
    if mixable is None or any(stored <= set(group) for group in mixable):
        return
    groups = [" with ".join(group) for group in mixable if len(group) > 1]
    advice = f"mix {' or '.join(groups)} only, or use" if groups else "use"
    found = f"{policy.place(_use(policy, number))} begins a plan with layers of {' and '.join(plan.variants)}"
    problem = f"{found} ({plan.name}), but the residual streams of these variants differ"
    raise FlexQuantError(f"{problem}; {advice} a policy without 'layers'")


def _layers(policy: Policy, number: int, variants: Collection[str], num_layers: int) -> Layers:
    """Return the variant of each layer in the plan of the rule with this number."""
    rule = policy.rules[number]
    places = {text: policy.place(("rules", number, "use", "layers", text)) for text in rule.layers}
    choices = {policy.place(_use(policy, number)): rule.variant}
    for place, variant in (choices | {places[text]: own for text, own in rule.layers.items()}).items():
        if variant not in variants:
            there = f"the checkpoint has {', '.join(sorted(variants))}"
            advice = "use one of those, choose another policy, or merge a checkpoint with that variant"
            raise FlexQuantError(f"{place} names the variant '{variant}', but {there}; {advice}")
    named: dict[int, str] = {}
    for text, place in places.items():
        for layer in _numbers(text, place, num_layers):
            if layer in named:
                both = f"both name layer {layer} of this model's {num_layers} layers"
                raise FlexQuantError(f'{place} overlaps "{named[layer]}": {both}; name every layer once')
            named[layer] = text
    return tuple(rule.layers[named[i]] if i in named else rule.variant for i in range(num_layers))


def _numbers(text: str, place: str, num_layers: int) -> range:
    """Return the layers that a key such as ``0-3`` or ``-1`` names in a model of ``num_layers``."""
    ends = parse_layers(text)
    for layer in ends:
        if not -num_layers <= layer < num_layers:
            problem = f"{place} names layer {layer}, but the model has {num_layers} layers"
            advice = f"use 0 to {num_layers - 1}, or -{num_layers} to -1 counted from the end"
            raise FlexQuantError(f"{problem}; {advice}")
    first, last = (layer % num_layers for layer in ends)
    if first > last:
        problem = f"{place} runs from layer {first} back to {last} of this model's {num_layers} layers"
        raise FlexQuantError(f"{problem}; put the earlier layer first")
    return range(first, last + 1)
