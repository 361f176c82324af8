# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Propose plans from the lowest precision to the highest, each with one layer raised beyond the plan before.

The gain of several layers together is not the sum of their gains alone, so these plans are proposals:
:mod:`flexquant.layers.searching` measures them whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from flexquant.layers.plans import Layers, all_in, with_layer


def greedy_chain(
    costs: Callable[[int, str], float], seconds: Mapping[str, float], num_layers: int
) -> list[Layers]:
    """Return plans from all layers in the last variant of ``seconds`` to all in the first.

    Each step raises the layer, and to the variant, that gains most for its time. ``costs(layer, variant)`` is
    the KL divergence that the layer costs in that variant while all others are in the first variant. (The
    gain while all others are in the last variant tells less: it includes the interaction of all layers'
    errors, which differs from plan to plan and from text to text.) ``seconds`` maps each variant, the most
    precise first, to the time of a decode pass with all layers in it.
    """
    variants = list(seconds)
    plan = all_in(variants[-1], num_layers)
    chain = [plan]

    def worth(layer: int, variant: str) -> tuple[bool, float]:
        before = plan[layer]
        won = costs(layer, before) - (0.0 if variant == variants[0] else costs(layer, variant))
        longer = (seconds[variant] - seconds[before]) / num_layers
        # Any step that gains comes before any step that loses, even if the latter saves time.
        return won > 0, won / longer if longer > 0 else math.copysign(math.inf, won)

    while any(variant != variants[0] for variant in plan):
        steps = [
            (layer, variant)
            for layer, before in enumerate(plan)
            for variant in variants[: variants.index(before)]
        ]
        layer, variant = max(steps, key=lambda step: (*worth(*step), -step[0]))
        plan = with_layer(plan, layer, variant)
        chain.append(plan)
    return chain


def beside(chain: Sequence[Layers], plan: Layers, steps: int) -> Iterator[Layers]:
    """Yield ``plan`` with its last step replaced by each of the ``steps`` steps that follow in the chain."""
    place = chain.index(plan)
    base = chain[max(0, place - 1)]
    for before, after in pairwise(chain[place : place + steps + 1]):
        ((layer, variant),) = ((n, v) for n, v in enumerate(after) if v != before[n])
        yield with_layer(base, layer, variant)


def raised(layers: Sequence[int], variant: str, lowest: str, num_layers: int) -> Layers:
    """Return the plan with these layers in ``variant`` and all others in ``lowest``."""
    return tuple(variant if layer in set(layers) else lowest for layer in range(num_layers))
