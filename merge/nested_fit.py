# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Fit the factors by which INT4 weights predict INT8 weights, and encode what the prediction lacks.

Rows and columns are fitted in turn, by least squares. A row of which 4 bits reach too little gets wider
steps: its INT8 weights are rounded again, to a larger scale.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flexquant.checkpoint.nested import HIGHEST, LARGEST, LOWEST, nested_parts, predict, scaled
from flexquant.checkpoint.schemes import DIFFERENCE, EXCEPTION, EXCEPTION_INPUT

ITERATIONS = 3
"""Rounds of the fit; of SmolLM2-135M's linears, a fourth brings less than 0.01 % more within reach."""
ROUNDINGS_A_SQUARE = 12
"""Rounding to integers has a mean squared error of 1/12."""
FARTHEST = LARGEST + HIGHEST + 0.5
"""Largest absolute prediction, before rounding, from which some difference leads back to INT8's range."""
SMALLEST = 2.0**-32
"""Smallest factor of a column, where the largest is 1: it predicts zeros."""

WIDTHS = (1.0, 1.5, 2.0, 3.0)
"""By what the scale of a row of INT8 weights may be multiplied."""

Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Returns the INT8 and INT4 weights of a layer, blocks of rows, float64 [rows, inputs] both."""


def fit_column(read: Blocks, inputs: int) -> Tensor:
    """Return the positive column, float32 [inputs], at most 1, that with the best rows predicts INT8 best."""
    column = torch.ones(inputs, dtype=torch.float64)
    for _ in range(ITERATIONS):
        above, below = torch.zeros_like(column), torch.zeros_like(column)
        for weight8, weight4 in read():
            row = fit_rows(weight8, weight4, column)
            above += row @ (weight8 * weight4)
            below += row**2 @ weight4**2
        column = (above / below).nan_to_num(nan=0.0, posinf=0.0)
        largest = column.max()
        column = (column / largest).clamp(min=SMALLEST) if largest > 0 else torch.ones_like(column)
    return column.float()


def fit_rows(weight8: Tensor, weight4: Tensor, column: Tensor) -> Tensor:
    """Return the best factor of each row, float64 [rows]; of a row without INT4 weights it is 1."""
    below = weight4**2 @ column**2
    return torch.where(below > 0, (weight8 * weight4) @ column / below, 1.0)


def shrink_rows(row: Tensor, values: Tensor, scale: Tensor, column: Tensor) -> Tensor:
    """Return factors of rows, float32 [rows, 1], that predict at most FARTHEST; arguments as of `scaled`."""
    largest = scaled(values, scale, row, column).abs().amax(dim=1, keepdim=True)
    smaller = row * ((LARGEST + HIGHEST) / largest)
    return torch.where(largest <= FARTHEST, row, smaller.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


class Misses(NamedTuple):
    """How far the INT8 weights of linears, as they are served, are from the source checkpoint's."""

    weights: int
    changed: int
    """How many weights are not the source's."""
    squared: float
    """Sum of the squared distances, in steps of the source's scales."""

    @property
    def added_noise(self) -> float:
        """The squared distances over the squared error of rounding to INT8 in the first place."""
        return ROUNDINGS_A_SQUARE * self.squared / self.weights

    @classmethod
    def total(cls, parts: Iterable[Self]) -> Self:
        return cls(*map(sum, zip(*parts, strict=True)))


class FittedRows(NamedTuple):
    """What rows of a linear are stored with."""

    row: Tensor
    """Factors, float32 [rows, 1]."""
    scale: Tensor
    """Scales of the INT8 weights [rows, 1], in their dtype."""
    missed: Misses


def fit_block(
    weight8: Tensor,
    scale8: Tensor,
    values: Tensor,
    scale: Tensor,
    column: Tensor,
    widths: Sequence[float] = WIDTHS,
) -> FittedRows:
    """Fit rows of a linear, for the width of ``widths`` by which each is missed least.

    ``weight8`` int8 [rows, inputs] has scales ``scale8`` [rows, 1]; other arguments are of :func:`scaled`.
    """
    inputs = weight8.shape[1]
    row, wide, squared, changed = _at_width(weight8, scale8, values, scale, column, widths[0])
    for width in widths[1:]:
        # Rounding to wider steps alone adds as much.
        some = (squared > inputs * (width**2 - 1) / ROUNDINGS_A_SQUARE).nonzero().flatten()
        if not len(some):
            break
        found = _at_width(weight8[some], scale8[some], values[some], scale[some], column, width)
        better = found[2] < squared[some]
        for best, new in zip((row, wide, squared, changed), found, strict=True):
            best[some[better]] = new[better]
    return FittedRows(row, wide, Misses(weight8.numel(), int(changed.sum()), float(squared.sum())))


def _at_width(
    weight8: Tensor, scale8: Tensor, values: Tensor, scale: Tensor, column: Tensor, width: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return factors and scales of rows; squared distances and numbers of changed weights, float64 [rows]."""
    wide = (scale8.float() * width).to(scale8.dtype)
    wanted, weight4 = widened(weight8, scale8, wide), (values * scale).flatten(1).double()
    row = fit_rows(wanted.double(), weight4, column.double()).float().unsqueeze(1)
    row = shrink_rows(row, values, scale, column)
    _, served = encode(wanted, predict(values, scale, row, column))
    far = distances(served, wide, weight8, scale8)
    return row, wide, far.square().sum(1), far.count_nonzero(1).double()


def widened(weight8: Tensor, scale8: Tensor, wide: Tensor) -> Tensor:
    """Return INT8 weights with scales ``scale8`` rounded to scales ``wide``; ties to even."""
    return (weight8.float() * _narrowing(scale8, wide)).round_().to(torch.int8)


def distances(served: Tensor, wide: Tensor, weight8: Tensor, scale8: Tensor) -> Tensor:
    """Return how far served weights with scales ``wide`` are from ``weight8``, in steps of ``scale8``."""
    return served.double() / _narrowing(scale8, wide) - weight8.double()


def is_widened(scale8: Tensor, wide: Tensor) -> bool:
    """Whether ``wide`` are scales that :func:`fit_block` gives for ``scale8``."""
    allowed = [(scale8.float() * width).to(scale8.dtype) for width in WIDTHS]
    return wide.dtype == scale8.dtype and bool((torch.stack(allowed) == wide).any(0).all())


def _narrowing(scale8: Tensor, wide: Tensor) -> Tensor:
    """Return by what weights become smaller, float32 [rows, 1]; 1 for a scale of 0."""
    return torch.where(wide == 0, 1.0, scale8.float() / wide.float())


def encode(weight8: Tensor, predicted: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return what is stored, but for factors, of rows of an INT8 weight [rows, inputs], and what it gives.

    ``predicted`` is what :func:`predict` returns. Exceptions are what differences miss by most, of equal ones
    the first. Types and shapes are those of :func:`nested_parts`; what is served are whole numbers, float32
    [rows, inputs].
    """
    wanted, inputs = weight8 - predicted, weight8.shape[1]
    differences = wanted.clamp(LOWEST, HIGHEST)
    missed = wanted.sub_(differences).abs_()
    order = missed.int() * inputs - torch.arange(inputs, dtype=torch.int32)  # no two of a row are equal
    exceptions = order.topk(nested_parts(*weight8.shape)[EXCEPTION][1][1], dim=1).indices.sort(dim=1).values
    exact = weight8.gather(1, exceptions)
    return {
        DIFFERENCE: pack_differences(differences),
        EXCEPTION: exact,
        EXCEPTION_INPUT: exceptions.to(torch.uint16),
    }, (predicted + differences).scatter_(1, exceptions, exact.float())


def pack_differences(differences: Tensor) -> Tensor:
    """Return U8 [rows, inputs / 2] from whole numbers [rows, inputs]."""
    nibbles = (differences - LOWEST).to(torch.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4
