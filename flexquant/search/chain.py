# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Plans from the lowest precision to the highest, each of which raises one more layer than the one before.

What several layers win together is not the sum of what each wins alone, so that these plans are proposals:
:mod:`flexquant.search.searching` measures them whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from flexquant.sensitivity.plans import Layers, all_in, with_layer


def greedy_chain(
    costs: Callable[[int, str], float], seconds: Mapping[str, float], num_layers: int
) -> list[Layers]:
    """Return plans from all layers in the last variant of ``seconds`` to all in the first.

    Each raises the layer whose next variant wins most for its time. ``costs(layer, variant)`` is the KL
    divergence that the layer alone costs in that variant, with all others in the first. (What it wins with
    all others in the last tells less: that holds what its error and all of theirs add to each other, which
    is another sum in every other plan, and on every other text.) ``seconds`` is the time of a decode pass
    with all layers in a variant, by variant, the most precise first.
    """
    variants = list(seconds)
    plan = all_in(variants[-1], num_layers)
    chain = [plan]

    def worth(layer: int, variant: str) -> tuple[bool, float]:
        before = plan[layer]
        won = costs(layer, before) - (0.0 if variant == variants[0] else costs(layer, variant))
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


def beside(chain: Sequence[Layers], plan: Layers, steps: int) -> Iterator[Layers]:
    """Yield plans that take each of the next ``steps`` of a chain in place of the last step to ``plan``."""
    place = chain.index(plan)
    base = chain[max(0, place - 1)]
    for before, after in pairwise(chain[place : place + steps + 1]):
        ((layer, variant),) = ((n, v) for n, v in enumerate(after) if v != before[n])
        yield with_layer(base, layer, variant)


def raised(layers: Sequence[int], variant: str, lowest: str, num_layers: int) -> Layers:
    """Return the plan with these layers in ``variant`` and all others in ``lowest``."""
    return tuple(variant if layer in set(layers) else lowest for layer in range(num_layers))
