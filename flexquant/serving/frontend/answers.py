# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the answers of FlexQuant's routes, for validation and for the server's OpenAPI schema."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from flexquant.checkpoint.model_config import JsonObject
from flexquant.policy.schema import Phase


class Reply(BaseModel):
    """An answer with exactly the declared keys."""

    model_config = ConfigDict(extra="forbid")


class PolicyName(Reply):
    name: str
    digest: str
    """SHA-256 of the policy's document."""


class RouteOfTokens(Reply):
    """The plan of the passes of ``min_tokens`` to ``max_tokens`` tokens, ends included."""

    min_tokens: int
    max_tokens: int
    plan: str


class LastPass(Reply):
    """The fields of :class:`~flexquant.serving.worker.forward_pass.Pass`, and the plan."""

    phase: Phase
    tokens: int
    sequences: int
    max_query_len: int
    scheduled_tokens: int
    plan: str


class PlanCounts(BaseModel):
    """Counters of one plan and phase, by their names in ``/metrics`` without ``flexquant:``."""

    model_config = ConfigDict(extra="allow")

    plan: str
    phase: Phase
    forward: float


class Status(Reply):
    """What the first rank serves, and the counters of all engines."""

    flexquant: str
    architecture: str
    policy: PolicyName
    plans: dict[str, list[str]]
    """Plan -> variant of each layer."""
    routes: dict[Phase, list[RouteOfTokens]]
    kernels: dict[str, list[str]]
    """Variant -> names of its kernels."""
    weight_bytes: dict[str, int]
    """Variant, or ``shared`` for weights that several variants use -> bytes of its weights."""
    weight_bytes_by_layers: dict[str, dict[str, int]]
    """The same bytes by range of decoder layers, e.g. ``0-3``; an empty text is outside of layers."""
    last_pass: LastPass | None
    counted: list[PlanCounts] | None
    ranks: int
    disagreement: list[PolicyName] | None = None
    """Policies of all engines, only if they differ."""


class ChangedRoute(Reply):
    """The fields of :class:`flexquant.policy.routes.RouteChange`."""

    phase: Phase
    min_tokens: int
    max_tokens: int
    before: str
    after: str


class PolicyChange(Reply):
    """Effects of changing the policy, or of a dry run."""

    before: PolicyName
    after: PolicyName
    captures_graphs: bool
    routes: list[ChangedRoute]
    dry_run: bool
    seconds: float


class Reason(Reply):
    message: str
    type: str
    param: str | None
    code: int


class Refusal(Reply):
    """Body of an HTTPException in vLLM's server."""

    error: Reason


def refusal_responses(**reasons: str) -> dict[int | str, JsonObject]:
    """Return OpenAPI responses for statuses, each given as ``_401="why"``.

    Unless 422 or ``_4XX`` is given, FastAPI adds a response of its own, 422 for a wrong parameter; vLLM
    answers 400.
    """
    return {status[1:]: {"model": Refusal, "description": why} for status, why in reasons.items()}
