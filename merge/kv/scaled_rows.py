# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Represent a weight as chunks of rows with its scales beside them, so that sums need few passes over memory.

Scales and variances are one number for a row, a column or a group of neighbouring columns. Multiplied out,
each would be as large as the weight; kept apart, they enter the sums as vectors in matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


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
