# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose how many layers get W8A8 of their own, so that the weights fit into a given memory.

All layers have INT4 weights, and those without W8A8 of their own compute INT8 weights from these in each
pass. Tuning measures the plan with as many layers as fit beside the variants alone; the times of plans with
other numbers of layers lie between those of the variants, as each layer costs its share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from flexquant.checkpoint.merged_checkpoint import weights_identity
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.checkpoint.module_names import describe_ranges
from flexquant.checkpoint.weight_bytes import format_bytes
from flexquant.doctor.examining import LoadedBytes, count_bytes
from flexquant.documents import parse_json
from flexquant.documents.results import table_lines
from flexquant.errors import FlexQuantError, UsageError
from flexquant.layers.sensitivity import SCHEMA as SENSITIVITY
from flexquant.layers.sensitivity import policy_that_loads
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.plans import Layers, Plan, all_in, describe_layers, with_layer
from flexquant.policy.rules import Policy, parse_policy, with_derivations
from flexquant.policy.schema import SCHEMA
from flexquant.tuning.candidates import FROM_INT4, SOURCE, eight_bit, find_variants
from flexquant.tuning.policy_file import TuningResult

STEPS = 4
"""Number of equal steps, from one copy to two, whose ends the table shows."""
ADVICE = "give the sensitivity.json that 'flexquant sensitivity' wrote for this checkpoint"


def fit_checkpoint(
    folder: Path,
    names: Sequence[str] | None,
    sensitivity: Path | None,
    *,
    memory: int | None,
    kv_tokens: int | None,
    devices: int,
) -> Fit:
    """Return what of a merged checkpoint fits into ``memory`` bytes a rank, or beside ``kv_tokens`` tokens.

    ``names``: variants to choose among (None: all); ``sensitivity``: file by which layers are chosen. Raises
    FlexQuantError without INT4 weights, or if not even one copy fits.
    """
    merged, num_layers = read_merged_config(folder)
    if SOURCE not in merged.variants:
        found = f"the checkpoint has {', '.join(merged.variants)}"
        advice = "merge one with INT4 weights under that name"
        raise UsageError(f"--memory and --kv-tokens need a variant {SOURCE}, and {found}; {advice}")
    variants = find_variants(merged, (*(names or merged.variants), SOURCE, FROM_INT4))
    losses, high = None, eight_bit(variants, merged)
    if sensitivity is not None and high is not None:
        losses = PlanLosses(sensitivity, high, (FROM_INT4, SOURCE), num_layers, weights_identity(folder))
    loaded = count_bytes(folder, policy_that_loads(variants), devices)
    if memory is None:
        assert kv_tokens is not None
        memory = loaded.most_beside(kv_tokens)
    is_nested, mixable = high in merged.nested, merged.mixable_groups
    return Fit(variants, memory, loaded, num_layers, losses, high=high, is_nested=is_nested, mixable=mixable)


class PlanLosses:
    """The KL divergence of decoding to a reference, in nats a token, of plans with two variants."""

    def __init__(
        self, file: Path, high: str, lower: Sequence[str], num_layers: int, files: Mapping[str, str]
    ) -> None:
        """Read ``file``; of the variants ``lower``, the first that it has stands for all of them.

        Raises UsageError for other ``files`` (:func:`weights_identity`), and for layers not measured.
        """
        self.file = file
        try:
            document = parse_json(file.read_text(encoding="utf-8"))
            found = {key: document[key] for key in ("schema", "layers", "files")}
            variants = [*document["variants"]]
            self._means = {plan: fmean(rows) for plan, rows in document["kl"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UsageError(f"{file} cannot be read ({e!r}); {ADVICE}") from e
        if found != {"schema": SENSITIVITY, "layers": num_layers, "files": dict(files)}:
            raise UsageError(f"{file} is of another checkpoint, or by another release; {ADVICE}")
        there = [variant for variant in lower if variant in variants]
        if variants[:1] != [high] or not there:
            compared = f"{file} compares {', '.join(variants)}"
            here = f"here {high} comes first, then {' or '.join(lower)}"
            raise UsageError(f"{compared}, and {here}; {ADVICE} and these variants")
        self._high, self._low = high, there[0]
        self._stands_for = {variant: there[0] for variant in lower if variant not in variants}
        whole = all_in(high, num_layers)
        needed = [whole, *(with_layer(whole, layer, self._low) for layer in range(num_layers))]
        if missing := [text for plan in needed if (text := describe_layers(plan)) not in self._means]:
            raise UsageError(f"{file} lacks {len(missing)} plans, such as {missing[0]}; measure to the end")
        self._whole, *alone = (self._means[describe_layers(plan)] for plan in needed)
        self.costs = [mean - self._whole for mean in alone]
        """What is lost if one layer alone leaves the highest precision, by layer."""

    @property
    def note(self) -> str:
        which = "".join(f", {low} in place of {v}" for v, low in self._stands_for.items())
        what = f"KL: of decoding by the plan for prompts, nats a token, from {self.file.name}{which}"
        return f"{what}; ~ is the sum of layers that were measured alone."

    def describe(self, plan: Layers) -> str:
        """Return the loss of a plan as text; ``-`` if the file says nothing of its variants."""
        layers = tuple(self._stands_for.get(variant, variant) for variant in plan)
        if (measured := self._means.get(describe_layers(layers))) is not None:
            return f"{measured:.3g}"
        if not set(layers) <= {self._high, self._low}:
            return "-"
        lost = sum(cost for cost, variant in zip(self.costs, layers, strict=True) if variant != self._high)
        return f"~{self._whole + lost:.3g}"


@dataclass(frozen=True)
class Choice:
    """Plans whose weights are loaded together."""

    name: str
    plans: tuple[Layers, ...]
    """The plan for prompts comes first."""
    twice: int
    """Number of layers with W8A8 of their own, nested or not, beside INT4 weights."""

    @property
    def names(self) -> list[str]:
        return [Plan.from_layers(plan).name for plan in self.plans]


class Fit:
    """The choices, and which of them fit into the memory."""

    def __init__(
        self,
        variants: Mapping[str, Policy],
        memory: int,
        loaded: LoadedBytes,
        num_layers: int,
        losses: PlanLosses | None = None,
        *,
        high: str | None,
        is_nested: bool = False,
        mixable: Sequence[Collection[str]],
    ) -> None:
        """Find the most layers that fit; raise FlexQuantError if not even one copy does.

        ``variants``: of :func:`find_variants`, with SOURCE and FROM_INT4; ``high``: of :func:`eight_bit`;
        ``is_nested``: whether ``high`` is stored as differences to SOURCE. ``memory``: bytes a rank for
        weights, and to compute INT8 weights in. ``mixable``: groups of variants that one plan can mix.
        """
        self._memory, self._loaded, self._losses = memory, loaded, losses
        stored = [v for v, policy in variants.items() if not policy.derived and v != SOURCE]
        whole = partial(all_in, num_layers=num_layers)
        one = Choice("one copy", (whole(FROM_INT4), whole(SOURCE)), 0)
        _check_one_copy(loaded, one, memory)
        order: Sequence[int] = range(num_layers)
        if losses is not None:
            order = sorted(order, key=losses.costs.__getitem__, reverse=True)
        can_mix = any({high, SOURCE} <= set(group) for group in mixable)
        numbers = range(1, num_layers + 1) if can_mix else [num_layers]
        mixed = [] if high is None else [_mixed(high, order, count, one, is_nested) for count in numbers]
        most = ([one] + [choice for choice in mixed if self._fits(choice)])[-1]
        shown = {num_layers * step // STEPS for step in range(1, STEPS + 1)} | {most.twice}
        beside = [variant for variant in variants if variant not in (high, SOURCE, FROM_INT4)]
        others = [Choice(f"{v}, {SOURCE}", (whole(v), whole(SOURCE)), 0) for v in beside]
        alone = [Choice(f"{v} alone", (whole(v),), 0) for v in [*stored, SOURCE]]
        self.choices = [*(c for c in mixed[::-1] if c.twice in shown), one, *others, *alone]
        """At equal speed the first is preferred."""
        self.candidates = dict(variants)
        """What is measured: the variants alone, and the plan with as many layers of W8A8 as fit."""
        if 0 < most.twice < num_layers:
            last = self.candidates.pop(FROM_INT4)
            document = {"schema": SCHEMA, "rules": [{"use": Plan.from_layers(most.plans[0]).rule_use()}]}
            policy = parse_policy(with_derivations(document, variants.values()), "the plan that fits")
            self.candidates |= {most.names[0]: policy, FROM_INT4: last}
        self.remark = _remark(most, order, high, losses, can_mix=can_mix)

    @property
    def together(self) -> list[list[str]]:
        """The candidates of every choice that fits and is measured."""
        fitting = [set(choice.names) for choice in self.choices if self._fits(choice)]
        measured = [names for names in fitting if names <= set(self.candidates)]
        return [[name for name in self.candidates if name in names] for names in measured]

    def report(self, tuned: TuningResult) -> TuningResult:
        """Return the tuned policy with the table of choices in its notes."""
        decision = tuned.decision
        possible = [c for c in self.choices if set(decision.variants) <= set(c.names)]
        chosen = min(possible, key=lambda choice: self._loaded.of(choice.plans))
        curves = tuned.times.prefill.values(), tuned.times.decode.values()
        prompts, batches = (set.intersection(*map(set, of_phase)) for of_phase in curves)
        prompt, batch = max(prompts), min(batches)
        head = ["", f"layers twice (of {len(chosen.plans[0])})", "bits/weight", "memory", "KV tokens"]
        head += [f"TTFT {prompt}", f"TPOT {batch}", *(["KL"] if self._losses else []), ""]
        rows = [head]
        for choice in self.choices:
            nbytes, bits = self._loaded.of(choice.plans), self._loaded.bits(choice.plans)
            row = [choice.name, str(choice.twice), f"{bits:.2f}", format_bytes(nbytes)]
            row.append(str(self._loaded.cache_tokens(nbytes)))
            row += [_time(tuned.times, choice, *one) for one in (("prefill", prompt), ("decode", batch))]
            row += [self._losses.describe(choice.plans[0])] if self._losses else []
            told = "chosen" if choice is chosen else "" if self._fits(choice) else "does not fit"
            rows.append([*row, told])
        notes = [
            self.remark,
            f"Choices for {format_bytes(self._memory)} a rank; ms for a prompt of {prompt} tokens, and for a "
            f"pass that decodes {batch}; ~ is interpolated between measured variants, layer by layer:",
            *table_lines(rows, numbers=range(1, len(head) - 1)),
            *([self._losses.note] if self._losses else []),
        ]
        return replace(tuned, notes=[*tuned.notes, *notes])

    def _fits(self, choice: Choice) -> bool:
        return self._loaded.of(choice.plans) <= self._memory


def _mixed(high: str, order: Sequence[int], count: int, one: Choice, is_nested: bool) -> Choice:
    """Return the choice in which the first ``count`` layers of ``order`` have the variant ``high``."""
    own = set(order[:count])
    plan = tuple(high if layer in own else FROM_INT4 for layer in range(len(order)))
    if count == len(order):
        rung = "nested" if is_nested else "two copies"
        return Choice(f"{rung}: {high}, {SOURCE}", (plan, one.plans[-1]), count)
    return Choice(f"one copy, and {'nested ' * is_nested}{high} in some", (plan, *one.plans), count)


def _check_one_copy(loaded: LoadedBytes, one: Choice, memory: int) -> None:
    least = loaded.of(one.plans)
    if least <= memory:
        return
    alone = loaded.of(one.plans[-1:])
    advice = f"; {SOURCE} alone fits: serve by that policy" if alone <= memory else ""
    takes = f"one copy takes {format_bytes(least)} a rank, more than the {format_bytes(memory)} there are for"
    parts = f"{format_bytes(alone)} of weights, and {format_bytes(least - alone)} to compute INT8 weights in"
    more = f"give --memory {math.ceil(least / 2**20)}MiB or more, or fewer --kv-tokens{advice}"
    raise FlexQuantError(f"{takes} weights: {parts}; {more}")


def _remark(
    most: Choice, order: Sequence[int], high: str | None, losses: PlanLosses | None, *, can_mix: bool
) -> str:
    """Say how many layers fit, which, and why these."""
    if high is None:
        return f"One copy is all that is possible: of {SOURCE} there is no variant in 8 bit beside it."
    if not can_mix:
        return f"One plan cannot mix layers of {high} and {SOURCE}, so there are one copy and two."
    which = f" ({describe_ranges(order[: most.twice])})" if 0 < most.twice < len(order) else ""
    by = f"those that lose most by {losses.file.name}" if losses else "from the first: no --sensitivity"
    return f"{most.twice} of {len(order)} layers{which} fit with {high} of their own, {by}."


def _time(times: PassTimes, choice: Choice, phase: str, size: int) -> str:
    """Return the milliseconds of the fastest plan of a choice."""
    found = []
    for name, plan in zip(choice.names, choice.plans, strict=True):
        layers, mark = ((name,), "") if name in times.variants else (plan, "~")
        found.append((times.seconds(layers, phase, size), mark))
    seconds, mark = min(found)
    return f"{mark}{1e3 * seconds:.3g}"
