# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Represent a weight as chunks of rows with its scales beside them, so that sums need few passes over memory.

Scales and variances are one number for a row, a column or a group of neighbouring columns. Multiplied out,
each would be as large as the weight; kept apart, they enter the sums as vectors in matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch

STORAGE_NOISE = 2.0**-8
"""Relative rounding error of a weight that was stored in bfloat16 between folding and quantising."""


@dataclass(frozen=True)
class ScaledRows:
    """Rows W of a weight: W[r, c] = rows[r] * values[r, c]. All float32."""

    values: torch.Tensor
    """Values before the row factors, [n, in]."""
    variance: torch.Tensor
    """Expected squared rounding error of ``values``, [n or 1, groups]; a group has in / groups columns."""
    rows: torch.Tensor
    """Factor of each row, [n]."""

    def matrix(self) -> torch.Tensor:
        """Return W, [n, in]."""
        return self.values * self.rows[:, None]

    def variances(self) -> torch.Tensor:
        """Return the expected squared rounding error of every number of W, [n, in]."""
        width = self.values.shape[1] // self.variance.shape[1]
        return self.variance.repeat_interleave(width, dim=1) * self.rows[:, None] ** 2

    def noise_of_rows(self, column_squares: torch.Tensor) -> torch.Tensor:
        """Return each row's sum of variances times the squared column factors [in]; [n]."""
        in_groups = column_squares.view(self.variance.shape[1], -1).sum(1)
        return self.rows * self.rows * (self.variance @ in_groups)


@dataclass(frozen=True)
class ScaledMatrix:
    """Rows of a weight in chunks, and factors of its columns; the chunks can be iterated once."""

    chunks: Iterator[ScaledRows]
    columns: torch.Tensor
    """Factor of each column, float32 [in]."""

    def times_columns(self, factors: torch.Tensor) -> ScaledMatrix:
        """Return the matrix with its columns multiplied by ``factors``, [in]."""
        return ScaledMatrix(self.chunks, self.columns * factors)

    def rotated(self, rotation: torch.Tensor) -> ScaledMatrix:
        """Return the matrix times the transpose of ``rotation`` [in, in]; a row's noise is spread evenly."""
        return ScaledMatrix(map(self._rotate(rotation), self.chunks), torch.ones_like(self.columns))

    def _rotate(self, rotation: torch.Tensor) -> Callable[[ScaledRows], ScaledRows]:
        turned = self.columns[:, None] * rotation.T
        squares = self.columns**2

        def rotate(chunk: ScaledRows) -> ScaledRows:
            variance = chunk.noise_of_rows(squares)[:, None] / len(squares)
            return ScaledRows(chunk.matrix() @ turned, variance, torch.ones_like(chunk.rows))

        return rotate


@dataclass(frozen=True)
class Sums:
    """Sums over each row, or each column, of two matrices a and b; float64 [n], n rows or columns."""

    aa: torch.Tensor
    """Sums of a * a."""
    ab: torch.Tensor
    """Sums of a * b."""
    bb: torch.Tensor
    """Sums of b * b."""
    bb_noise: torch.Tensor
    """Sums of b * b * v, where v is the variance that rounding gives a - b: the variance of <b, a - b>.

    Storage in bfloat16 is left out: it adds at most 0.003 to a gain's error, a tenth of the tightest bound.
    """

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Sums:
        return Sums(*(function(getattr(self, f.name)) for f in fields(self)))

    def gains(self) -> torch.Tensor:
        """Return the gain g of every row or column in a = g * b + noise, [n].

        Least squares of a on b underestimates the gain if b is noisy, and least squares of b on a
        overestimates it. The true gain lies between the two; the value nearest 1 is returned, so that
        quantisation noise explains as much as it can. Rows with more noise than signal get exactly 1.
        """
        low = self.ab / self.bb
        high = torch.where(self.ab > 0, self.aa / self.ab, low)
        gain = torch.ones_like(low).clamp(torch.minimum(low, high), torch.maximum(low, high))
        return torch.where(self.bb > 0, gain, torch.where(self.aa > 0, torch.inf, 1.0))


@dataclass(frozen=True)
class MatrixSums:
    rows: Sums
    columns: Sums
    noise: torch.Tensor
    """Sums over each row of the variance that rounding gives a - b; float64 [rows]."""


def sum_products(a: ScaledMatrix, b: ScaledMatrix) -> MatrixSums:
    """Return the sums of two matrices of equal shape, which come in equal chunks."""
    a_squares, b_squares = a.columns**2, b.columns**2
    weights = (a_squares, a.columns * b.columns, b_squares, b_squares * a_squares, b_squares * b_squares)
    row_parts, noise_parts = [], []
    column_sums = torch.zeros(len(weights), len(a.columns), dtype=torch.float64)
    memory = torch.empty(2, 0, 0, dtype=torch.float32)
    for x, y in zip(a.chunks, b.chunks, strict=True):
        if len(x.values) > memory.shape[1]:
            memory = torch.empty(2, *x.values.shape, dtype=torch.float32)
        rows, columns = _sums_of_chunk(x, y, weights, memory[:, : len(x.values)])
        row_parts.append(rows)
        noise_parts.append(x.noise_of_rows(a_squares) + y.noise_of_rows(b_squares))
        column_sums += columns
    rows = torch.cat(row_parts, dim=1).double()
    column_sums *= torch.stack(weights)
    bb = rows[2]
    noise = torch.cat(noise_parts).double() + bb * (2 * STORAGE_NOISE**2 / 3)
    return MatrixSums(_as_sums(rows), _as_sums(column_sums), noise)


def _sums_of_chunk(
    a: ScaledRows, b: ScaledRows, weights: tuple[torch.Tensor, ...], memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over rows [5, n], and over columns [5, in], the latter without the columns' weights.

    ``memory`` [2, n, in] is overwritten: allocating it for each chunk would cost as much as a product.
    """
    aa, ab, bb = a.rows * a.rows, a.rows * b.rows, b.rows * b.rows
    product, weighted = memory
    sums = []
    for x, y, factor, weight in (
        (a.values, a.values, aa, weights[0]),
        (a.values, b.values, ab, weights[1]),
        (b.values, b.values, bb, weights[2]),
    ):
        torch.mul(x, y, out=product)
        sums.append((factor * (product @ weight), factor @ product))
    squares = product
    for noisy, factor, weight in ((a, bb * aa, weights[3]), (b, bb * bb, weights[4])):
        if noisy.variance.shape[1] == 1:
            factor, product = factor * noisy.variance[:, 0], squares
        else:
            groups = (len(squares), noisy.variance.shape[1], -1)
            torch.mul(squares.view(groups), noisy.variance[:, :, None], out=weighted.view(groups))
            product = weighted
        sums.append((factor * (product @ weight), factor @ product))
    rows, columns = zip(*sums, strict=True)
    return torch.stack(rows), torch.stack(columns)


def _as_sums(terms: torch.Tensor) -> Sums:
    return Sums(terms[0], terms[1], terms[2], terms[3] + terms[4])
