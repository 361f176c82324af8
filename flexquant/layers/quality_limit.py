# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Limit the quality loss of a tuned policy: the tuning gives speed, a search of plans gives quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from flexquant.checkpoint.model_config import JsonObject
from flexquant.layers.searching import Budget, Search
from flexquant.layers.sensitivity import Study
from flexquant.policy.plans import Plan, all_in, describe_layers
from flexquant.policy.rules import add_derivations, parse_policy
from flexquant.tuning.policy_file import TuningResult


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

    A loss is the KL divergence of decode to the study's reference, in nats a token. A decode rule whose
    variant loses more takes the fastest plan that does not, which can mix layers of several variants; any
    other such rule takes the most precise variant. :class:`Search` keeps its measurements in ``file``. Raises
    FlexQuantError if no plan loses so little.
    """
    found = Search(study, tuned.times, Budget(max_kl=most)).run(file, overwrite=overwrite, progress=progress)
    number, kl = study.subject.num_layers, found.document["kl"]
    losses = {variant: fmean(kl[describe_layers(all_in(variant, number))]) for variant in study.variants}
    plan = found.chosen

    def limited(rule: JsonObject) -> JsonObject:
        if losses[rule["use"]] <= most:
            return rule
        decodes = rule.get("when", {}).get("phase") == "decode"
        return {**rule, "use": Plan.from_layers(plan.layers).rule_use() if decodes else study.highest}

    document = {**tuned.document, "rules": [limited(rule) for rule in tuned.document["rules"]]}
    document = add_derivations(document, plan.layers, study.variants)
    told = ", ".join(f"{variant} {loss:.3g}" for variant, loss in losses.items())
    notes = [
        f"KL divergence of decode to {study.reference_name} on {study.text.name}, nats a token: {told}.",
        f"At most {most:g} is allowed: the fastest plan, {describe_layers(plan.layers)}, "
        f"loses {plan.kl:.3g}.",
    ]
    if document["rules"] != tuned.document["rules"]:
        document["description"] += f"; where that loses more than {most:g} nats a token, another plan"
    parse_policy(document, "the tuned policy")
    return replace(tuned, document=document, notes=[*tuned.notes, *notes])
