# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a search may spend: KL divergence, decode time or layers; and the best plan that keeps to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexquant.errors import FlexQuantError, UsageError
from flexquant.sensitivity.plans import Layers, describe


@dataclass(frozen=True)
class Measured:
    """A whole plan: its mean KL divergence to the reference, nats a token, and a decode pass in seconds."""

    layers: Layers
    kl: float
    seconds: float


@dataclass(frozen=True)
class Budget:
    """One of the three is given. Raises :class:`UsageError` for what no plan can keep to."""

    max_kl: float | None = None
    """Most KL divergence, in nats a token: the fastest plan that loses no more."""
    max_slowdown: float | None = None
    """Most time above the fastest variant's, as a share of it: the best plan that takes no more."""
    layers: int | None = None
    """Layers that are not in the lowest precision, exactly: the best plan that has so many."""

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
        """Whether a plan keeps to what is known before its quality is measured.

        ``raised``: its layers that are not in the lowest precision; ``slowdown``: as ``max_slowdown``.
        """
        if self.layers is not None:
            return raised == self.layers
        return self.max_slowdown is None or slowdown <= self.max_slowdown

    def choose(self, plans: Sequence[Measured]) -> Measured:
        """Return the best of the plans that keep to the budget; raise FlexQuantError naming the nearest."""
        if self.max_kl is None:
            return min(plans, key=lambda plan: (plan.kl, plan.seconds))
        kept = [plan for plan in plans if plan.kl <= self.max_kl]
        if not kept:
            nearest = min(plans, key=lambda plan: plan.kl)
            raise FlexQuantError(
                f"no plan loses at most {self.max_kl:g} nats a token; the nearest, "
                f"{describe(nearest.layers)}, loses {nearest.kl:.3g}: allow that with --max-kl, or add a "
                "more precise variant"
            )
        return min(kept, key=lambda plan: (plan.seconds, plan.kl))


def front(plans: Sequence[Measured]) -> list[Measured]:
    """Return the plans to which no other is both faster and better, the fastest first."""
    found: list[Measured] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.kl)):
        if not found or plan.kl < found[-1].kl:
            found.append(plan)
    return found
