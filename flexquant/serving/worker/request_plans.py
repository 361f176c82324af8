# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Remember which plans computed the tokens of each request, in order, until after it is answered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from itertools import islice
from typing import NamedTuple

from flexquant.checkpoint.model_config import JsonObject

KEPT = 4096
"""Number of latest requests that are remembered; more only if more are running."""
NUMBER = re.compile(r"^\d+_")
RANDOM = re.compile(r"-[0-9a-f]{8}$")
REST = re.compile(r"([-_]\d+)?(-[0-9a-f]{16}-beam-\d+)?(-[0-9a-f]{8})?")
"""Matches all that may follow the ``id`` of a response in the name of a request."""


class PlanRun(NamedTuple):
    """Consecutive tokens of a request that passes of one plan and one span of moments computed."""

    plan: str
    tokens: int
    moment: str

    def to_data(self) -> JsonObject:
        """Return JSON-able data, without ``moment`` if it is empty."""
        data = self._asdict()
        return data if self.moment else {key: data[key] for key in ("plan", "tokens")}


class RequestPlans:
    """The tokens that each plan has computed, for the latest and the running requests."""

    def __init__(self) -> None:
        self._runs: dict[str, list[PlanRun]] = {}
        self._forgotten: dict[str, None] = {}
        """Requests that were forgotten last; if one continues, it is incomplete."""
        self._incomplete: set[str] = set()
        self.under_way: Callable[[], Container[str]] = lambda: ()
        """Returns the running requests, which are not forgotten."""

    def record(self, tokens: Mapping[str, int], plan: str, moment: str = "") -> None:
        """Record a pass of ``plan``; ``tokens`` maps each request in it to its number of tokens.

        ``moment`` is the name of the pass's span of moments, empty if the policy tells none apart.
        """
        for request, number in tokens.items():
            if request in self._forgotten and request not in self._runs:
                self._incomplete.add(request)
            runs = self._runs.setdefault(request, [])
            if runs and (runs[-1].plan, runs[-1].moment) == (plan, moment):
                runs[-1] = runs[-1]._replace(tokens=runs[-1].tokens + number)
            else:
                runs.append(PlanRun(plan, number, moment))
        if len(self._runs) > KEPT:
            self._forget(len(self._runs) - KEPT)

    def _forget(self, number: int) -> None:
        """Forget ``number`` requests, the oldest of those that have ended."""
        under_way = self.under_way()
        for request in [*islice((name for name in self._runs if name not in under_way), number)]:
            del self._runs[request]
            self._incomplete.discard(request)
            self._forgotten.pop(request, None)
            self._forgotten[request] = None
        for request in [*islice(self._forgotten, max(0, len(self._forgotten) - KEPT))]:
            del self._forgotten[request]

    def find(self, response: str) -> list[JsonObject]:
        """Return the requests that a response answers, each with its runs in order.

        ``response`` is the response's ``id``. A response can answer several prompts, or one prompt several
        times. A request whose first runs have been forgotten is ``incomplete``.
        """
        return [
            {"request": request, "plans": [run.to_data() for run in runs]}
            | ({"incomplete": True} if request in self._incomplete else {})
            for request, runs in self._runs.items()
            if answers(response, request)
        ]

    def tokens(self, requests: Collection[str]) -> dict[str, dict[str, int]]:
        """Return request -> plan -> number of tokens, for the requests that are remembered in full.

        ``requests`` are the names that a caller of the engine gives. Several answers to one prompt (``n``)
        are one such request, and counted together.
        """
        wanted = set(requests)
        found: dict[str, Counter[str]] = {}
        incomplete: set[str] = set()
        for name, runs in self._runs.items():
            outer = RANDOM.sub("", name)
            names = {name, outer, NUMBER.sub("", name), NUMBER.sub("", outer)} & wanted
            if name in self._incomplete:
                incomplete |= names
            for request in names:
                for run in runs:
                    found.setdefault(request, Counter())[run.plan] += run.tokens
        return {request: dict(plans) for request, plans in found.items() if request not in incomplete}


def answers(response: str, request: str) -> bool:
    """Whether the response with this ``id`` answers the request of this name.

    vLLM writes in front of the ``id`` which of several answers to one prompt (``n``) the request is. Behind
    the ``id`` it writes which of several prompts, which path of a beam search, and eight random digits. Only
    the whole ``id`` finds a request, so that nobody can find requests of others.
    """
    number = NUMBER.match(request)
    return any(
        request.startswith(response, start) and REST.fullmatch(request, start + len(response))
        for start in {0, number.end() if number else 0}
    )
