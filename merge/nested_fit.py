# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Fit the factors by which INT4 weights predict INT8 weights, and encode what the prediction lacks.

Rows and columns are fitted in turn, by least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from flexquant.checkpoint.nested import HIGHEST, LARGEST, LOWEST, nested_parts, scaled
from flexquant.checkpoint.schemes import DIFFERENCE, EXCEPTION, EXCEPTION_INPUT

ITERATIONS = 3
"""Rounds of the fit; of SmolLM2-135M's linears, a fourth brings less than 0.01 % more within reach."""
ROUNDINGS_A_SQUARE = 12
"""Rounding to integers has a mean squared error of 1/12."""
FARTHEST = LARGEST + HIGHEST + 0.5
"""Largest absolute prediction, before rounding, from which some difference leads back to INT8's range."""
SMALLEST = 2.0**-32
"""Smallest factor of a column, where the largest is 1: it predicts zeros."""

Blocks = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Returns the INT8 and INT4 weights of a layer, blocks of rows, float64 [rows, inputs] both."""


def fit_column(read: Blocks, inputs: int) -> torch.Tensor:
    """Return the column, float32 [inputs], that with the best rows predicts the INT8 weights best.

    All factors are finite and positive, the largest is 1.
    """
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


def fit_rows(weight8: torch.Tensor, weight4: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return the best factor of each row, float64 [rows]; of a row without INT4 weights it is 1."""
    below = weight4**2 @ column**2
    return torch.where(below > 0, (weight8 * weight4) @ column / below, 1.0)


def shrink_rows(
    row: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, column: torch.Tensor
) -> torch.Tensor:
    """Return factors of rows, float32 [rows, 1], that predict at most FARTHEST; arguments as of `scaled`."""
    largest = scaled(values, scale, row, column).abs().amax(dim=1, keepdim=True)
    smaller = row * ((LARGEST + HIGHEST) / largest)
    return torch.where(largest <= FARTHEST, row, smaller.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


class Misses(NamedTuple):
    """How far the INT8 weights of linears, as they are served, are from the source checkpoint's."""

    weights: int
    changed: int
    """How many weights are not the source's."""
    squared: int
    """Sum of the squared distances."""

    @property
    def added_noise(self) -> float:
        """The squared distances over the squared error of rounding to INT8 in the first place."""
        return ROUNDINGS_A_SQUARE * self.squared / self.weights

    @classmethod
    def total(cls, parts: Iterable[Misses]) -> Misses:
        return cls(*map(sum, zip(*parts, strict=True)))


def encode(weight8: torch.Tensor, predicted: torch.Tensor) -> tuple[dict[str, torch.Tensor], Misses]:
    """Return what is stored, but for factors, of rows of an INT8 weight [rows, inputs], and what it misses.

    ``predicted`` is what :func:`predict` returns. Differences lead nearest to the weights; exceptions are
    what these miss by most, of equal ones the first. Types and shapes are those of :func:`nested_parts`.
    """
    wanted, inputs = weight8 - predicted, weight8.shape[1]
    differences = wanted.clamp(LOWEST, HIGHEST)
    missed = wanted.sub_(differences).abs_()
    order = missed.int() * inputs - torch.arange(inputs, dtype=torch.int32)  # no two of a row are equal
    exceptions = order.topk(nested_parts(*weight8.shape)[EXCEPTION][1][1], dim=1).indices.sort(dim=1).values
    missed.scatter_(1, exceptions, 0)
    changed, squared = int(missed.count_nonzero()), int(missed.square_().long().sum())
    return {
        DIFFERENCE: pack_differences(differences),
        EXCEPTION: weight8.gather(1, exceptions),
        EXCEPTION_INPUT: exceptions.to(torch.uint16),
    }, Misses(weight8.numel(), changed, squared)


def pack_differences(differences: torch.Tensor) -> torch.Tensor:
    """Return U8 [rows, inputs / 2] from whole numbers [rows, inputs]."""
    nibbles = (differences - LOWEST).to(torch.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4
