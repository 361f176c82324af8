# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Report what each layer costs and gains, and what a search measured: tables, plots, the searched policy.

All plans are scored on the same rows, so differences are taken row by row. Intervals are 95 % bootstrap
percentile intervals over the rows (B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 13).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import new_figure
from flexquant.documents.yaml_document import to_yaml
from flexquant.layers.searching import Budget, SearchResult, front
from flexquant.layers.sensitivity import StudyDocument
from flexquant.policy.plans import Layers, Plan, all_in, describe_layers, with_layer
from flexquant.policy.rules import Policy, parse_policy, with_derivations
from flexquant.policy.schema import SCHEMA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, in nats a token, and the ends of its interval, which are infinite for one row."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2g} ({self.low:.2g} to {self.high:.2g})"


def estimate(rows: ArrayLike) -> Estimate:
    """Return the mean of one number per row, with its interval."""
    values = np.asarray(rows, dtype=np.float64)
    if len(values) < 2:
        return Estimate(float(values.mean()), -np.inf, np.inf)
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high))


def _kl(document: StudyDocument, layers: Layers) -> np.ndarray:
    return np.array(document["kl"][describe_layers(layers)])


def format_sensitivity_table(document: StudyDocument) -> str:
    """Return a Markdown table of the layers; those that gain most in the highest precision come first."""
    variants, number = document["variants"], document["layers"]
    of = document["reference"] or f"{variants[0]} itself"
    alone = ", ".join(f"{v} {estimate(_kl(document, all_in(v, number)))}" for v in variants)
    columns = effects(document)
    ranking = sorted(range(number), key=lambda layer: columns[-1][1][layer].mean, reverse=True)
    lines = [f"KL divergence to {of}, nats a token, with all layers in one variant: {alone}.", ""]
    lines += [f"| layer | {' | '.join(title for title, _ in columns)} |", "| --- |" + " --- |" * len(columns)]
    for layer in ranking:
        lines.append(f"| {layer} | {' | '.join(str(found[layer]) for _, found in columns)} |")
    return "\n".join(lines)


def effects(document: StudyDocument) -> list[tuple[str, list[Estimate]]]:
    """Return columns, (title, estimate of each layer), the last of them of what layers win in the highest.

    A layer costs the KL divergence of alone leaving the highest precision, and wins that of the lowest.
    """
    highest, *lower = document["variants"]
    *higher, lowest = document["variants"]
    asked = [("costs", v, highest, 1) for v in lower] + [("wins", v, lowest, -1) for v in reversed(higher)]
    columns = []
    for verb, variant, others, sign in asked:
        whole = all_in(others, document["layers"])
        changed = (with_layer(whole, layer, variant) for layer in range(len(whole)))
        found = [estimate(sign * (_kl(document, plan) - _kl(document, whole))) for plan in changed]
        columns.append((f"{verb} in {variant}, all others in {others}", found))
    return columns


def draw_sensitivity(document: StudyDocument) -> Figure:
    """Draw each layer's cost and gain; raise FlexQuantError without matplotlib."""
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    columns = effects(document)
    for number, (title, found) in enumerate(columns):
        means = np.array([e.mean for e in found])
        apart = np.array([[e.mean - e.low for e in found], [e.high - e.mean for e in found]])
        places = np.arange(len(found)) + 0.3 * (number / max(1, len(columns) - 1) - 0.5)
        bars = np.where(np.isfinite(apart), apart, 0)
        axes.errorbar(places, means, yerr=bars, fmt="o", capsize=2, label=title)
    axes.axhline(0, color="grey", linewidth=0.8)
    title = f"{document['checkpoint']}: each layer alone in another precision"
    axes.set(xlabel="decoder layer", ylabel="KL divergence, nats a token", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def format_search_table(found: SearchResult) -> str:
    """Return a Markdown table of the variants alone, the chosen plan and the front, the fastest first."""
    best = front(found.searched)
    rows = ["| plan | decode pass, ms | KL divergence, nats a token | |", "| --- | --- | --- | --- |"]
    for plan in sorted(found.searched, key=lambda plan: (plan.seconds, plan.kl)):
        notes = ["**chosen**"] if plan == found.chosen else []
        notes += ["no other is faster and better"] if plan in best else []
        if notes or len(set(plan.layers)) == 1:
            text, told = describe_layers(plan.layers), "; ".join(notes)
            kl = estimate(found.document["kl"][text])
            rows.append(f"| {text} | {1000 * plan.seconds:.4g} | {kl} | {told} |")
    return "\n".join(rows)


def searched_policy_document(
    base: Policy, found: SearchResult, variants: dict[str, Policy], budget: Budget, sequences: int
) -> JsonObject:
    """Return ``base`` as data, with the chosen plan in the rule that decodes ``sequences`` sequences.

    If that rule also takes other phases, a new rule for decode alone is put in front of it.
    """
    document = {**base.document, "schema": SCHEMA}
    rules = list(document["rules"])
    place = [rule.matches("decode", sequences, sequences) for rule in base.rules].index(True)
    when = {**rules[place].get("when", {}), "phase": "decode"}
    takes_others = base.rules[place].when.phases != ("decode",)
    use = Plan.from_layers(found.chosen.layers).rule_use()
    rules[place : place if takes_others else place + 1] = [{"when": when, "use": use}]
    told = f"decode by a searched plan, {budget}: {describe_layers(found.chosen.layers)}"
    document = with_derivations(document | {"description": told, "rules": rules}, variants.values())
    parse_policy(document, "the searched policy")
    return document


def policy_text(document: JsonObject, found: SearchResult) -> str:
    """Return the policy as YAML, below a comment with the measurements."""
    table = format_search_table(found).splitlines()
    of = found.document["reference"] or f"{found.document['variants'][0]} itself"
    numbers = Counter(found.chosen.layers).most_common()
    counts = ", ".join(f"{number} {variant}" for variant, number in numbers)
    told = f"KL divergence to {of} on {found.document['text']['file']}, of decoding."
    return to_yaml(document, [told, f"Layers by variant: {counts}.", "", *table])


def draw_search(found: SearchResult) -> Figure:
    """Draw KL divergence over decode time; raise FlexQuantError without matplotlib."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for title, plans, marker, size in (
        ("searched, and the variants alone", found.searched, "o", 6),
        ("chosen", [found.chosen], "*", 12),
    ):
        places = [1000 * plan.seconds for plan in plans], [plan.kl for plan in plans]
        axes.plot(*places, marker, markersize=size, label=title)
    name = found.document["checkpoint"]
    axes.set(xlabel="decode pass, ms", ylabel="KL divergence, nats a token", title=name)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
