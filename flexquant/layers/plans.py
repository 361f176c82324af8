# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make plans, as the variants of their layers, from other plans, and write them for results."""

from __future__ import annotations

from flexquant.checkpoint.layer_ranges import describe_range
from flexquant.policy.plans import runs

Layers = tuple[str, ...]
"""The variant of every decoder layer, in order."""


def all_in(variant: str, num_layers: int) -> Layers:
    """Return the plan that runs every layer in one variant."""
    return (variant,) * num_layers


def with_layer(layers: Layers, layer: int, variant: str) -> Layers:
    """Return the plan with this one layer in another variant."""
    return (*layers[:layer], variant, *layers[layer + 1 :])


def describe_layers(layers: Layers) -> str:
    """Return e.g. ``w8a8 0-3, w4a16 4-29``; different plans have different texts."""
    return ", ".join(f"{variant} {describe_range(run)}" for variant, run in runs(layers))
