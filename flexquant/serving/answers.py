# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What FlexQuant's routes answer: for the server's OpenAPI schema, and held to by it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from flexquant.policy.schema import Phase


class Answer(BaseModel):
    """Of these keys and no others."""

    model_config = ConfigDict(extra="forbid")


class PolicyName(Answer):
    name: str
    digest: str
    """SHA-256 of the policy's document."""


class RouteOfTokens(Answer):
    """The plan of the passes of ``min_tokens`` to ``max_tokens`` tokens, both included."""

    min_tokens: int
    max_tokens: int
    plan: str
    moment: str | None = None
    """The name of a :class:`flexquant.policy.moments.Span`, only where the policy tells moments apart."""


class LastPass(Answer):
    """The fields of :class:`flexquant.serving.forward_pass.Pass`; the last four only with moments."""

    phase: Phase
    tokens: int
    sequences: int
    max_query_len: int
    scheduled_tokens: int
    plan: str
    moment: str | None = None
    since_prompt: int | None = None
    unsure: bool | None = None
    signal: float | None = None


class Counted(BaseModel):
    """The counters of one plan and phase, by their names in ``/metrics`` without ``flexquant:``."""

    model_config = ConfigDict(extra="allow")

    plan: str
    phase: Phase
    forward: float


class Status(Answer):
    """What the first rank serves, and all engines have counted."""

    flexquant: str
    architecture: str
    policy: PolicyName
    plans: dict[str, list[str]]
    """By plan, the variant of each layer."""
    routes: dict[Phase, list[RouteOfTokens]]
    kernels: dict[str, list[str]]
    """By variant."""
    weight_bytes: dict[str, int]
    """By variant, and under ``shared`` those that several hold."""
    weight_bytes_by_layers: dict[str, dict[str, int]]
    """The same by range of decoder layers, ``0-3``, with an empty text for what is outside of them."""
    last_pass: LastPass | None
    counted: list[Counted] | None
    ranks: int
    disagreement: list[PolicyName] | None = None
    """The policies of all engines, only where they differ."""


class Run(Answer):
    """Consecutive tokens of one plan and one moment."""

    plan: str
    tokens: int
    moment: str | None = None


class ServedRequest(Answer):
    request: str
    plans: list[Run]
    incomplete: bool | None = None
    """Only where what came first has been forgotten: true."""


class ServedRequests(Answer):
    """The requests that a response answers."""

    requests: list[ServedRequest]


class ChangedRoute(Answer):
    """The fields of :class:`flexquant.policy.route_changes.RouteChange`."""

    phase: Phase
    min_tokens: int
    max_tokens: int
    before: str
    after: str
    moment: str | None = None


class PolicyChange(Answer):
    """What another policy changes, or would change."""

    before: PolicyName
    after: PolicyName
    captures_graphs: bool
    routes: list[ChangedRoute]
    dry_run: bool
    seconds: float


class Reason(Answer):
    message: str
    type: str
    param: str | None
    code: int


class Refusal(Answer):
    """How vLLM's server words an HTTPException."""

    error: Reason


def refusals(**reasons: str) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's responses for statuses, each given as ``_401="why"``.

    FastAPI adds one of its own, 422 for a wrong parameter, unless there is one for 422 or ``_4XX``; vLLM
    answers 400.
    """
    return {status[1:]: {"model": Refusal, "description": why} for status, why in reasons.items()}
