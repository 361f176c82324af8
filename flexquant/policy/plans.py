# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Represent a plan, the variant of every decoder layer: its name, and its form in a policy's rule."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import describe_range, describe_ranges

Layers = tuple[str, ...]
"""The variant of every decoder layer, in order."""


@dataclass(frozen=True)
class Plan:
    """The variant that runs each decoder layer. Equal plans have equal names."""

    name: str
    """The variant of most layers, then the other variants with their layers: ``w4a16+w8a8[0-3,29]``."""
    layers: Layers

    @classmethod
    def from_layers(cls, layers: Layers) -> Self:
        base = Counter(layers).most_common(1)[0][0]
        numbers: dict[str, list[int]] = {}
        for number, variant in enumerate(layers):
            numbers.setdefault(variant, []).append(number)
        others = {variant: describe_ranges(found) for variant, found in numbers.items() if variant != base}
        return cls(plan_name(base, others), layers)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that the plan takes layers from, in the order of their first layer."""
        return tuple(dict.fromkeys(self.layers))

    def rule_use(self) -> str | JsonObject:
        """Return the value of ``use`` in a policy's rule for the plan."""
        default = Counter(self.layers).most_common(1)[0][0]
        others = {describe_range(run): variant for variant, run in runs(self.layers) if variant != default}
        return {"default": default, "layers": others} if others else default


def plan_name(base: str, others: Mapping[str, str]) -> str:
    """Return a plan's name; ``others`` are the variants beside ``base``, with their layers as text."""
    return "+".join([base, *(f"{variant}[{layers}]" for variant, layers in others.items())])


def runs(layers: Sequence[str]) -> Iterator[tuple[str, range]]:
    """Yield the variant of each run of consecutive layers in one variant, and the run."""
    for variant, group in groupby(range(len(layers)), key=lambda layer: layers[layer]):
        numbers = [*group]
        yield variant, range(numbers[0], numbers[-1] + 1)


def all_in(variant: str, num_layers: int) -> Layers:
    """Return the layers of the plan that runs every layer in one variant."""
    return (variant,) * num_layers


def with_layer(layers: Layers, layer: int, variant: str) -> Layers:
    """Return the layers of the plan with this one layer in another variant."""
    return (*layers[:layer], variant, *layers[layer + 1 :])


def describe_layers(layers: Layers) -> str:
    """Return e.g. ``w8a8 0-3, w4a16 4-29``; different plans have different texts."""
    return ", ".join(f"{variant} {describe_range(run)}" for variant, run in runs(layers))
