# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A tuned policy that loses no more than it may: speed from the tuning, quality from a search of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flexquant.policy.deriving import add_derivations
from flexquant.policy.rules import parse_policy
from flexquant.search.budget import Budget
from flexquant.search.searching import Search
from flexquant.sensitivity.measuring import Study
from flexquant.sensitivity.plans import all_in, describe, rule_use
from flexquant.tuning.policy_file import Tuned


def limit_loss(
    tuned: Tuned,
    study: Study,
    most: float,
    file: Path,
    *,
    overwrite: bool,
    progress: Callable[[str], None],
) -> Tuned:
    """Return what was tuned, with another plan where a variant loses more than ``most`` nats a token.

    A loss is the KL divergence of decode to the study's reference. A decode rule whose variant loses more
    takes the fastest plan that does not, layers of several variants included, and any other rule the most
    precise variant. What is measured is kept in ``file``, as :class:`Search` does. Raises FlexQuantError
    where no plan loses so little.
    """
    found = Search(study, tuned.times, Budget(max_kl=most)).run(file, overwrite=overwrite, progress=progress)
    number, kl = study.subject.num_layers, found.document["kl"]
    losses = {variant: fmean(kl[describe(all_in(variant, number))]) for variant in study.variants}
    plan = found.chosen

    def limited(rule: dict[str, Any]) -> dict[str, Any]:
        if losses[rule["use"]] <= most:
            return rule
        decodes = rule.get("when", {}).get("phase") == "decode"
        return {**rule, "use": rule_use(plan.layers) if decodes else study.highest}

    document = {**tuned.document, "rules": [limited(rule) for rule in tuned.document["rules"]]}
    document = add_derivations(document, plan.layers, study.variants)
    told = ", ".join(f"{variant} {loss:.3g}" for variant, loss in losses.items())
    notes = [
        f"KL divergence of decode to {study.reference_name} on {study.text.name}, nats a token: {told}.",
        f"At most {most:g} is allowed: the fastest plan, {describe(plan.layers)}, loses {plan.kl:.3g}.",
    ]
    if document["rules"] != tuned.document["rules"]:
        document["description"] += f"; where that loses more than {most:g} nats a token, another plan"
    parse_policy(document, "the tuned policy")
    return replace(tuned, document=document, notes=[*tuned.notes, *notes])
