# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define a search's budget (KL divergence, decode time or layers), and choose the best plan within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexquant.errors import FlexQuantError, UsageError
from flexquant.policy.plans import Layers, describe_layers


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan, its mean KL divergence to the reference in nats a token, and its decode pass in seconds."""

    layers: Layers
    kl: float
    seconds: float


@dataclass(frozen=True)
class Budget:
    """A limit for plans. Raises :class:`UsageError` unless exactly one field is given, and is at least 0."""

    max_kl: float | None = None
    """Largest KL divergence, in nats a token; the fastest plan within it is chosen."""
    max_slowdown: float | None = None
    """Largest slowdown against the fastest variant (0.1 = 10 %); the plan with the least KL is chosen."""
    layers: int | None = None
    """Exact number of layers above the lowest precision; the plan with the least KL is chosen."""

    def __post_init__(self) -> None:
        given = [value for value in (self.max_kl, self.max_slowdown, self.layers) if value is not None]
        if len(given) != 1:
            raise UsageError("give one budget: --max-kl, --max-slowdown or --layers")
        if given[0] < 0:
            raise UsageError(f"the budget is {given[0]:g}; give 0 or more")

    def __str__(self) -> str:
        if self.max_kl is not None:
            return f"at most {self.max_kl:g} nats a token"
        if self.max_slowdown is not None:
            return f"at most {100 * self.max_slowdown:g} % slower than the fastest variant"
        return f"{self.layers} layers raised"

    def check_layers(self, num_layers: int) -> None:
        if self.layers is not None and self.layers > num_layers:
            raise UsageError(
                f"the model has {num_layers} layers, not {self.layers}; give --layers up to that"
            )

    def allows(self, raised: int, slowdown: float) -> bool:
        """Whether a plan is within the limits on layers and time, which are known without measuring.

        ``raised`` is the number of its layers above the lowest precision, ``slowdown`` as ``max_slowdown``.
        """
        if self.layers is not None:
            return raised == self.layers
        return self.max_slowdown is None or slowdown <= self.max_slowdown

    def choose(self, plans: Sequence[MeasuredPlan]) -> MeasuredPlan:
        """Return the best plan within the budget; raise FlexQuantError, naming the nearest, if none is."""
        if self.max_kl is None:
            return min(plans, key=lambda plan: (plan.kl, plan.seconds))
        kept = [plan for plan in plans if plan.kl <= self.max_kl]
        if not kept:
            nearest = min(plans, key=lambda plan: plan.kl)
            raise FlexQuantError(
                f"no plan loses at most {self.max_kl:g} nats a token; the nearest, "
                f"{describe_layers(nearest.layers)}, loses {nearest.kl:.3g}: allow that with --max-kl, or "
                "add a more precise variant"
            )
        return min(kept, key=lambda plan: (plan.seconds, plan.kl))


def front(plans: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """Return the Pareto front, the fastest plan first: plans to which no other is both faster and better."""
    found: list[MeasuredPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.kl)):
        if not found or plan.kl < found[-1].kl:
            found.append(plan)
    return found
