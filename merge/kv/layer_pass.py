# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run a layer once, record what passes through it, and compare two such passes.

Both passes get the same outputs from the matrices, so every number of one is compared with the same number of
the other. Rounding parameters to their dtype explains a part of the difference; only if passes differ by more
than float32 arithmetic explains, passes with randomly rounded parameters estimate that part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flexquant.merge.kv.matrices import Answer, OwnForward, answer_at_random, is_linear, random
from flexquant.merge.kv.skeleton import Skeleton, is_state

OUTPUT = "the layer's output"
CALL = ", call "
"""Separates a matrix's name from the number of a later call in the same pass."""

Cached: TypeAlias = tuple[dict[str, Tensor], set[str]]
"""Which rows of each matrix reach the cache, bool [out] by name, and parameters that a state is made with."""
Gains = Callable[[str, Tensor], Tensor | None]
"""Called with a matrix's name and input [tokens, in]; can return factors of its output features, [out]."""
ROUNDED_PASSES = 16
"""Number of passes with randomly rounded parameters that estimate the effect of rounding."""
ROUNDING = 6.0
"""Any number of two passes may differ by this many times the estimated effect of rounding."""
ARITHMETIC = 1e-5
"""Effect of float32 arithmetic in another order, as a share of a number's size plus the mean size."""

Parameters = Mapping[str, Tensor]
RunLayer = Callable[[Parameters], "LayerPass"]


@dataclass
class LayerPass:
    """Tensors recorded in a pass."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Input of each matrix, float32 [tokens, in], by name, in the order of the calls."""
    beside: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Further arguments of the experts: which experts each token goes to, and their weights."""
    answers: dict[str, Answer] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    """Cached K and V, states, and the layer's output, float32."""


def run_pass(
    skeleton: Skeleton,
    layer: int,
    parameters: Parameters,
    reference: LayerPass | None = None,
    *,
    gains: Gains | None = None,
    rotation: Tensor | None = None,
    until_cached: bool = False,
    with_gradients: bool = False,
) -> LayerPass:
    """Run a layer whose matrices answer as in ``reference``, or at random, in the basis of ``rotation``."""
    seen = LayerPass()

    def answer(name: str, module: nn.Module, forward: OwnForward, args: tuple[Any, ...]) -> Answer:
        point = name if name not in seen.inputs else f"{name}{CALL}{len(seen.inputs)}"
        given = args[0]
        seen.inputs[point] = x = given.flatten(0, -2).clone()  # layers compute in place
        seen.beside[point] = tuple(other for other in args[1:] if isinstance(other, Tensor))
        answered: Answer
        if reference is not None:
            answered = reference.answers[point]
        elif is_linear(module):
            answered = random(name, (*given.shape[:-1], module.out_features)).requires_grad_(with_gradients)
        else:
            answered = _mapped(leaf, answer_at_random(name, module, forward, args))
        seen.answers[point] = answered
        answered = _mapped(Tensor.clone, answered)
        factors = None if gains is None else gains(point, x)
        bias = module.bias if is_linear(module) else None
        if isinstance(answered, Tensor):
            answered = answered if factors is None else answered * factors
            answered = answered if bias is None else answered + bias
        return answered

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(with_gradients and tensor.is_floating_point())

    hidden = skeleton.hidden(layer) if rotation is None else skeleton.hidden(layer) @ rotation
    with torch.set_grad_enabled(with_gradients):
        cached, output = skeleton.run(layer, parameters, answer, hidden, until_cached)
    seen.results = dict(cached)
    if output is not None:
        seen.results[OUTPUT] = output
    return seen


def find_cached(run: Callable[..., LayerPass], parameters: Parameters) -> Cached:
    """Return what the cache of a layer is computed with; ``run`` runs it with parameters.

    A head of a state may forget so fast that its gate has no gradient; so rows count too that reach the state
    with parameters of ones.
    """
    given = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    seen = run(given, with_gradients=True)
    states = [tensor for name, tensor in seen.results.items() if is_state(name)]
    gradients = _gradients(states, list(given.values()))
    of_states = {name for name, found in zip(given, gradients, strict=True) if found is not None}
    rows = _rows_cached(seen)
    if of_states:
        ones = {name: torch.ones_like(p) if name in of_states else p for name, p in given.items()}
        for name, also in _rows_cached(run(ones, with_gradients=True)).items():
            rows[name] = rows.get(name, also) | also
    return rows, of_states


def _rows_cached(seen: LayerPass) -> dict[str, Tensor]:
    """Return which rows of each matrix change what a pass cached, bool [out] by name.

    No gradient flows through a matrix. So if its answer reaches the cache, its input counts as cached too.
    """
    targets = [tensor for name, tensor in seen.results.items() if name != OUTPUT]
    cached: dict[str, Tensor] = {}
    for name, y in reversed(seen.answers.items()):
        if not isinstance(y, Tensor) or not y.requires_grad:
            continue
        (gradient,) = _gradients(targets, [y])
        if gradient is not None and bool((rows := gradient.flatten(0, -2).ne(0).any(0)).any()):
            matrix = name.partition(CALL)[0]
            cached[matrix] = cached.get(matrix, rows) | rows
            targets.append(seen.inputs[name])
    return cached


def _gradients(targets: list[Tensor], of: list[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradient of a random sum of the targets by each tensor; None where it changes none."""
    reached = [t for t in targets if t.requires_grad]
    if not reached or not of:
        return [None] * len(of)
    total = torch.stack([(t * random(str(i), tuple(t.shape))).sum() for i, t in enumerate(reached)]).sum()
    return torch.autograd.grad(total, of, retain_graph=True, allow_unused=True)


def _mapped(change: Callable[[Tensor], Tensor], answer: Answer) -> Answer:
    return tuple(_mapped(change, one) for one in answer) if isinstance(answer, tuple) else change(answer)


def explain_difference(
    seen: LayerPass,
    reference: LayerPass,
    run: RunLayer,
    parameters: Sequence[Parameters],
    steps: Mapping[str, float],
) -> str:
    """Return how a pass differs from the reference by more than rounding; empty if it does not.

    ``parameters`` are those of the pass and of the reference, ``steps`` the relative rounding error of each.
    The text names the first parameter that causes the difference by itself, if there is one.
    """
    if not changed(seen, reference):
        return ""
    of_pass, of_reference = parameters
    effect = rounding_effect(run, of_reference, steps, reference)
    if not (places := changed(seen, reference, effect)):
        return ""
    for name, tensor in of_pass.items():
        if not torch.equal(tensor, of_reference[name]):
            alone = changed(run({**of_reference, name: tensor}), reference, effect)
            if set(alone) & set(places):
                size = of_reference[name].norm().clamp_min(1e-30)
                error = float((tensor - of_reference[name]).norm() / size)
                return f"{name} differs by {error:.3g}, which changes {places[0]} by more than rounding does"
    return f"{places[0]} differs by more than the rounding of its parameters explains"


def changed(seen: LayerPass, reference: LayerPass, effect: Parameters | None = None) -> list[str]:
    """Return where passes differ by more than rounding's ``effect`` by name, and factors of columns."""
    effect = effect or {}
    effects = {name: effect.get(name, 0.0) for name in (*seen.results, *seen.inputs)}
    places = [x for x, y in seen.results.items() if excess(y, reference.results[x], effects[x]) > 1]
    for name, x in seen.inputs.items():
        expected = reference.inputs[name]
        factors = (1.0, column_factors(x, expected))
        if min(excess(x, factor * expected, effects[name]) for factor in factors) > 1:
            places.append(f"what {name} is given")
        if any(excess(a, b) > 1 for a, b in zip(seen.beside[name], reference.beside[name], strict=True)):
            places.append(f"the choice of {name}")
    return places


def rounding_effect(
    run: RunLayer, parameters: Parameters, steps: Mapping[str, float], reference: LayerPass
) -> dict[str, Tensor]:
    """Return the root-mean-square change of each number of a pass when its parameters are rounded."""
    squares: dict[str, Tensor] = {}
    for i in range(ROUNDED_PASSES):
        signs = {name: random(f"{name} {i}", tuple(p.shape)).sign() for name, p in parameters.items()}
        seen = run({name: p * (1 + steps[name] * signs[name]) for name, p in parameters.items()})
        for before, after in ((reference.inputs, seen.inputs), (reference.results, seen.results)):
            for name, tensor in after.items():
                change = (tensor - before[name]).square() / ROUNDED_PASSES
                squares[name] = squares.get(name, 0.0) + change
    return {name: square.sqrt() for name, square in squares.items()}


def column_factors(x: Tensor, reference: Tensor) -> Tensor:
    """Return the least-squares factor f of each column in x = f * reference, [in]; 1 for columns of zeros."""
    size = reference.square().sum(0)
    return torch.where(size > 0, (x * reference).sum(0) / size, 1.0)


def excess(x: Tensor, expected: Tensor, effect: Tensor | float = 0.0) -> float:
    """Return the largest ratio of a difference to what rounding and arithmetic explain of it."""
    x, expected = x.float(), expected.float()
    arithmetic = ARITHMETIC * (expected.abs() + expected.abs().mean())
    allowed = (ROUNDING * effect + arithmetic).clamp_min(1e-30)
    return float(((x - expected).abs() / allowed).nan_to_num(nan=torch.inf).max())
