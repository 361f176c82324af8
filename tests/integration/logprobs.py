# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compares the answers of two engines by their logprobs."""

from __future__ import annotations

from tests.integration.conftest import Answers

EVERY = slice(None)
TIE = 0.1
"""Nats between two tokens, either of which a 16-bit engine may choose if it sums in another order."""


def distance(one: Answers, other: Answers, steps: slice = EVERY) -> float:
    """Return the mean difference in nats of the logprobs that both list, at ``steps`` after equal tokens."""
    differences: list[float] = []
    for (ids, found), (other_ids, other_found) in zip(one, other, strict=True):
        for i in range(min(len(ids), len(other_ids)))[steps]:
            if ids[:i] == other_ids[:i]:
                common = found[i].keys() & other_found[i].keys()
                differences += [abs(found[i][token] - other_found[i][token]) for token in common]
    return sum(differences) / len(differences)


def assert_equal_but_for_ties(found: Answers, expected: Answers, wholly: float = 0.5) -> None:
    """Assert that greedy answers agree: a share of them ``wholly``, the others up to a tie of ``expected``.

    It is for engines that give the same passes other shapes: some CPUs' kernels then sum in another order.
    """
    whole = 0
    for (ids, _), (others, logprobs) in zip(found, expected, strict=True):
        assert len(ids) == len(others)
        differ = next((i for i, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b), None)
        if differ is None:
            whole += 1
            continue
        behind = logprobs[differ][others[differ]] - logprobs[differ].get(ids[differ], float("-inf"))
        assert behind < TIE, f"token {differ} is {ids[differ]}, {behind:.2f} nats behind {others[differ]}"
    assert whole >= len(expected) * wholly
