# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare what a layer computes beside its matrices in two variants, up to the rounding of parameters.

Both passes get the same outputs from the matrices, so every number of one pass is compared with the same
number of the other. Rounding each parameter to its dtype explains a part of the difference; passes with
parameters rounded at random estimate that part. They run only if the two passes differ by more than float32
arithmetic in another order explains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flexquant.merge.kv.layer_pass import LayerPass
from flexquant.merge.kv.skeleton import random

ROUNDED_PASSES = 16
"""Number of passes with randomly rounded parameters that estimate the effect of rounding."""
ROUNDING = 6.0
"""Any number of two passes may differ by this many times the estimated effect of rounding."""
ARITHMETIC = 1e-5
"""Effect of float32 arithmetic in another order, as a share of a number's size plus the mean size."""

Parameters = Mapping[str, torch.Tensor]
RunLayer = Callable[[Parameters], LayerPass]
"""Runs the layer with other parameters; its matrices answer as in the reference's pass."""


def explain_difference(
    seen: LayerPass,
    reference: LayerPass,
    run: RunLayer,
    parameters: tuple[Parameters, Parameters],
    steps: Mapping[str, float],
) -> str:
    """Return how a pass differs from the reference by more than rounding; empty if it does not.

    ``parameters`` are the parameters of the pass and of the reference, ``steps`` the relative rounding error
    of each. The text names the first parameter that causes the difference by itself, if there is one.
    """
    if not changed(seen, reference):
        return ""
    of_pass, of_reference = parameters
    effect = rounding_effect(run, of_reference, steps, reference)
    places = changed(seen, reference, effect)
    if not places:
        return ""
    for name, tensor in of_pass.items():
        if not torch.equal(tensor, of_reference[name]):
            alone = changed(run({**of_reference, name: tensor}), reference, effect)
            if set(alone) & set(places):
                size = of_reference[name].norm().clamp_min(1e-30)
                error = float((tensor - of_reference[name]).norm() / size)
                return f"{name} differs by {error:.3g}, which changes {places[0]} by more than rounding does"
    return f"{places[0]} differs by more than the rounding of its parameters explains"


def changed(
    seen: LayerPass, reference: LayerPass, effect: Mapping[str, torch.Tensor] | None = None
) -> list[str]:
    """Return where two passes differ: in results, or in inputs of matrices by more than column factors.

    ``effect`` is the effect of rounding on each result and input, by name.
    """
    effect = effect or {}
    places = [
        name
        for name, result in seen.results.items()
        if excess(result, reference.results[name], effect.get(name, 0.0)) > 1
    ]
    for name, x in seen.inputs.items():
        expected = reference.inputs[name]
        factors = (1.0, column_factors(x, expected))
        if min(excess(x, factor * expected, effect.get(name, 0.0)) for factor in factors) > 1:
            places.append(f"what {name} is given")
        if any(excess(a, b) > 1 for a, b in zip(seen.beside[name], reference.beside[name], strict=True)):
            places.append(f"the choice of {name}")
    return places


def rounding_effect(
    run: RunLayer, parameters: Parameters, steps: Mapping[str, float], reference: LayerPass
) -> dict[str, torch.Tensor]:
    """Return the root-mean-square change of each number of a pass when its parameters are rounded."""
    squares: dict[str, torch.Tensor] = {}
    for i in range(ROUNDED_PASSES):
        seen = run(
            {
                name: p * (1 + steps[name] * random(f"{name} {i}", tuple(p.shape)).sign())
                for name, p in parameters.items()
            }
        )
        for before, after in ((reference.inputs, seen.inputs), (reference.results, seen.results)):
            for name, tensor in after.items():
                change = (tensor - before[name]).square() / ROUNDED_PASSES
                squares[name] = squares.get(name, 0.0) + change
    return {name: square.sqrt() for name, square in squares.items()}


def column_factors(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the least-squares factor f of each column in x = f * reference, [in]; 1 for columns of zeros."""
    size = reference.square().sum(0)
    return torch.where(size > 0, (x * reference).sum(0) / size, 1.0)


def excess(x: torch.Tensor, expected: torch.Tensor, effect: torch.Tensor | float = 0.0) -> float:
    """Return the largest ratio of a difference to what rounding and arithmetic explain of it."""
    x, expected = x.float(), expected.float()
    arithmetic = ARITHMETIC * (expected.abs() + expected.abs().mean())
    allowed = (ROUNDING * effect + arithmetic).clamp_min(1e-30)
    return float(((x - expected).abs() / allowed).nan_to_num(nan=torch.inf).max())
