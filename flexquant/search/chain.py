# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Plans from the lowest precision to the highest, each of which raises one more layer than the one before.

What several layers win together is not the sum of what each wins alone, so that these plans are proposals:
:mod:`flexquant.search.searching` measures them whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from flexquant.sensitivity.plans import Layers, all_in, with_layer


def greedy_chain(
    wins: Callable[[int, str], float], seconds: Mapping[str, float], num_layers: int
) -> list[Layers]:
    """Return plans from all layers in the last variant of ``seconds`` to all in the first.

    Each raises the layer whose next variant wins most for its time. ``wins(layer, variant)`` is the KL
    divergence that the layer alone wins in that variant, with all others in the last. ``seconds`` is the
    time of a decode pass with all layers in a variant, by variant, the most precise first.
    """
    variants = list(seconds)
    plan = all_in(variants[-1], num_layers)
    chain = [plan]

    def worth(layer: int, variant: str) -> tuple[bool, float]:
        before = plan[layer]
        won = wins(layer, variant) - (0.0 if before == variants[-1] else wins(layer, before))
        longer = (seconds[variant] - seconds[before]) / num_layers
        # Steps that win come before those that lose, whatever a step that saves time loses.
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


def raised(layers: Sequence[int], variant: str, lowest: str, num_layers: int) -> Layers:
    """Return the plan with these layers in ``variant`` and all others in ``lowest``."""
    return tuple(variant if layer in set(layers) else lowest for layer in range(num_layers))
