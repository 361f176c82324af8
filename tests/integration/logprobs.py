# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How far apart the answers of two engines are."""

from __future__ import annotations

from tests.integration.conftest import Answers

EVERY = slice(None)


def distance(one: Answers, other: Answers, steps: slice = EVERY) -> float:
    """Mean difference in nats of the logprobs that both list, at those ``steps`` that follow equal tokens."""
    differences: list[float] = []
    for (ids, found), (other_ids, other_found) in zip(one, other, strict=True):
        for i in range(min(len(ids), len(other_ids)))[steps]:
            if ids[:i] == other_ids[:i]:
                common = found[i].keys() & other_found[i].keys()
                differences += [abs(found[i][token] - other_found[i][token]) for token in common]
    return sum(differences) / len(differences)
