# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Report a search's measurements as a table and a plot, and write the policy with the chosen plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import new_figure
from flexquant.documents.yaml_document import to_yaml
from flexquant.layers.searching import Budget, MeasuredPlan, SearchResult, front
from flexquant.layers.sensitivity_report import estimate
from flexquant.policy.plans import Plan, describe_layers
from flexquant.policy.rules import Policy, add_derivations, parse_policy
from flexquant.policy.schema import SCHEMA


def format_search_table(found: SearchResult) -> str:
    """Return a Markdown table, the fastest plan first.

    The table has the variants alone, the chosen plan, the baselines of ``--compare``, and the plans to which
    no other is both faster and better.
    """
    named = {
        describe_layers(plan.layers): "chosen by no measurement: " + name
        for name, plan in found.others.items()
    }
    plans = {plan.layers: plan for plan in [*found.searched, *found.others.values()]}
    best = {plan.layers for plan in front(list(plans.values()))}
    rows = [
        "| plan | decode pass, ms | KL divergence, nats a token | |",
        "| --- | --- | --- | --- |",
    ]
    for plan in sorted(plans.values(), key=lambda plan: (plan.seconds, plan.kl)):
        text = describe_layers(plan.layers)
        is_pure = len(set(plan.layers)) == 1
        if not (is_pure or plan.layers in best or text in named or plan.layers == found.chosen.layers):
            continue
        notes = [
            *(["**chosen**"] if plan.layers == found.chosen.layers else []),
            *([named[text]] if text in named else []),
            *(["no other is faster and better"] if plan.layers in best else []),
        ]
        kl = estimate(found.document["kl"][text])
        rows.append(f"| {text} | {1000 * plan.seconds:.4g} | {kl} | {'; '.join(notes)} |")
    return "\n".join(rows)


def searched_policy_document(
    base: Policy, found: SearchResult, variants: dict[str, Policy], budget: Budget, sequences: int
) -> JsonObject:
    """Return ``base`` as data, with the chosen plan in the rule that decodes ``sequences`` sequences.

    If that rule also takes other phases, a new rule for decode alone is put in front of it.
    """
    document = {**base.document, "schema": SCHEMA}
    rules = list(document["rules"])
    place = next(
        number for number, rule in enumerate(base.rules) if rule.matches("decode", sequences, sequences)
    )
    rule = {
        "when": {**rules[place].get("when", {}), "phase": "decode"},
        "use": Plan.from_layers(found.chosen.layers).rule_use(),
    }
    takes_others = base.rules[place].when.phases != ("decode",)
    rules[place : place if takes_others else place + 1] = [rule]
    document = add_derivations(document, found.chosen.layers, variants) | {
        "description": f"decode by a searched plan, {budget}: {describe_layers(found.chosen.layers)}",
        "rules": rules,
    }
    parse_policy(document, "the searched policy")
    return document


def policy_text(document: JsonObject, found: SearchResult) -> str:
    """Return the policy as YAML, below a comment with the measurements."""
    table = format_search_table(found).splitlines()
    of = found.document["reference"] or f"{found.document['variants'][0]} itself"
    comments = [
        f"KL divergence to {of} on {found.document['text']['file']}, of decoding.",
        f"Layers by variant: {_counts(found.chosen)}.",
        "",
        *table,
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in comments) + to_yaml(document, compact=True)


def _counts(plan: MeasuredPlan) -> str:
    return ", ".join(f"{number} {variant}" for variant, number in Counter(plan.layers).most_common())


def save_search_plot(found: SearchResult, file: Path) -> None:
    """Draw KL divergence over decode time as a PNG; raise FlexQuantError without matplotlib."""
    figure, canvas = new_figure(7, 4.5)
    axes = figure.subplots()
    kinds = [
        ("searched, and the variants alone", found.searched, "o"),
        ("as many layers raised, chosen by no measurement", list(found.others.values()), "x"),
        ("chosen", [found.chosen], "*"),
    ]
    for title, plans, marker in kinds:
        if plans:
            axes.plot(
                [1000 * plan.seconds for plan in plans],
                [plan.kl for plan in plans],
                marker,
                markersize=12 if marker == "*" else 6,
                label=title,
            )
    axes.set_xlabel("decode pass, ms")
    axes.set_ylabel("KL divergence, nats a token")
    axes.set_title(found.document["checkpoint"])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    canvas.print_figure(file, format="png")
