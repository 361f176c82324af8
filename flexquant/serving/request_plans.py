# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which plans computed the tokens of each request, in order, for who asks when it has been answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEPT = 4096
"""Requests that are remembered, the last ones to come."""


class RequestPlans:
    """For the last requests, how many tokens which plan has computed."""

    def __init__(self) -> None:
        self._runs: dict[str, list[tuple[str, int]]] = {}

    def record(self, tokens: Mapping[str, int], plan: str) -> None:
        """Note a pass of ``plan``: by the name of each request in it, how many of its tokens."""
        for request, number in tokens.items():
            runs = self._runs.setdefault(request, [])
            if runs and runs[-1][0] == plan:
                runs[-1] = (plan, runs[-1][1] + number)
            else:
                runs.append((plan, number))
        while len(self._runs) > KEPT:
            del self._runs[next(iter(self._runs))]

    def find(self, name: str) -> list[dict[str, Any]]:
        """Return the requests whose names begin with ``name``, each with its runs of one plan in order.

        vLLM's names begin with the ``id`` of the response; one response may answer several prompts.
        """
        return [
            {"request": request, "plans": [{"plan": plan, "tokens": number} for plan, number in runs]}
            for request, runs in self._runs.items()
            if request.startswith(name)
        ]
