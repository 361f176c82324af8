# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Represent plans as the variants of their layers, and write them for results and policies."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

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
    return ", ".join(f"{variant} {_range(first, last)}" for variant, first, last in _runs(layers))


def rule_use(layers: Layers) -> Any:
    """Return the value of ``use`` in a policy's rule for the plan."""
    ((default, number),) = Counter(layers).most_common(1)
    if number == len(layers):
        return default
    return {
        "default": default,
        "layers": {
            _range(first, last): variant for variant, first, last in _runs(layers) if variant != default
        },
    }


def _runs(layers: Layers) -> list[tuple[str, int, int]]:
    """Return the runs of consecutive layers in one variant: (variant, first layer, last layer)."""
    runs = []
    for variant, group in groupby(enumerate(layers), key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        runs.append((variant, numbers[0], numbers[-1]))
    return runs


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
