# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Add derivations to a policy document whose rules use derived variants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexquant.checkpoint.model_config import JsonObject
from flexquant.policy.rules import Policy


def add_derivations(
    document: JsonObject, variants: Iterable[str], policies: Mapping[str, Policy]
) -> JsonObject:
    """Return the document with the derivations in the policies of ``variants`` added."""
    derived = dict(document.get("derive", {}))
    for variant in sorted(set(variants)):
        derived |= policies[variant].document.get("derive", {})
    return {**document, "derive": derived} if derived else document
