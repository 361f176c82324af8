# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Judge whether two matrices differ by quantisation noise only; BOUNDS.md says how the bounds were found.

Every row that writes the KV cache is compared. What is to be found in the other matrices and the embeddings
(another basis, moved scales, other weights) changes every row. So their rows form blocks of 16, and of every
k blocks one is compared, in k consecutive layers each. k is at most 16, and 1 for up to 255 rows: with 128
rows the gain of a column is known to 2 % for INT4, and the median over all columns much better. A difference
is always found if it changes every row or column, more than 16 (k - 1) consecutive rows, or the same rows in
k consecutive layers; one in m rows anywhere with a probability of 1 - (1 - 1/k)^m.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 16
LEAST_ROWS = 128
LEAST_SHARE = 16
"""Least share of the rows that is compared, as its inverse."""
STORAGE_NOISE = 2.0**-8
"""Relative rounding error of a weight that was stored in bfloat16 between folding and quantising."""
NOISE_FACTOR = 4.0
"""K and V may err by this many times the norm of the predicted rounding noise."""
ERROR_CAP = 0.8
"""Largest relative error of any matrix, however noisy; unrelated matrices have 1.41."""
ROW_GAIN = 0.1
"""The gain of any row of K or V may be off by this share."""
ROW_GAIN_SIGMAS = 8.0
"""Standard deviations of a row's gain under noise that are allowed, if they are more than ROW_GAIN."""
COLUMN_GAIN = 0.03
"""The median gain of the columns may be off by this share."""
COLUMN_GAIN_SIGMAS = 4.0
"""Standard deviations of a column's gain under noise that are allowed, if more than COLUMN_GAIN."""
OUTPUT_NOISE_FACTOR = 6.0
"""Matrices other than K and V may err by this many times the noise: GPTQ moves down_proj more."""
OUTPUT_ROW_GAIN = 0.25
"""The gain of any row of such a matrix may be off by this share, for the same reason."""
TINY = 1e-30
"""Least size in divisions, for matrices of zeros."""


def sample_rows(count: int, turn: int, least: int = LEAST_ROWS) -> list[range]:
    """Return blocks of ``least`` rows and a sixteenth of all, or all; ``turn`` chooses which blocks."""
    every = max(1, min(LEAST_SHARE, count // least))
    starts = range(turn % every * BLOCK_ROWS, count, every * BLOCK_ROWS)
    return [range(start, min(start + BLOCK_ROWS, count)) for start in starts]


def row_numbers(blocks: Sequence[range]) -> Tensor:
    """Return the row numbers in the blocks, int64 [rows]."""
    return torch.cat([torch.arange(block.start, block.stop) for block in blocks])


@dataclass(frozen=True)
class ScaledRows:
    """Rows W of a weight: W[r, c] = rows[r] * values[r, c]. All float32."""

    values: Tensor
    """Values before the row factors, [n, in]."""
    variance: Tensor
    """Expected squared rounding error of ``values``, [n or 1, groups]; a group has in / groups columns."""
    rows: Tensor
    """Factor of each row, [n]."""

    def matrix(self) -> Tensor:
        """Return W, [n, in]."""
        return self.values * self.rows[:, None]

    def variances(self) -> Tensor:
        """Return the expected squared rounding error of every number of W, [n, in]."""
        width = self.values.shape[1] // self.variance.shape[1]
        return self.variance.repeat_interleave(width, dim=1) * self.rows[:, None] ** 2

    def noise_of_rows(self, column_squares: Tensor) -> Tensor:
        """Return each row's sum of variances times the squared column factors [in]; [n]."""
        in_groups = column_squares.view(self.variance.shape[1], -1).sum(1)
        return self.rows * self.rows * (self.variance @ in_groups)


@dataclass(frozen=True)
class ScaledMatrix:
    """Rows of a weight in chunks, and factors of its columns; the chunks can be iterated once."""

    chunks: Iterator[ScaledRows]
    columns: Tensor
    """Factor of each column, float32 [in]."""

    def times_columns(self, factors: Tensor) -> "ScaledMatrix":
        """Return the matrix with its columns multiplied by ``factors``, [in]."""
        return ScaledMatrix(self.chunks, self.columns * factors)

    def rotated(self, rotation: Tensor) -> "ScaledMatrix":
        """Return the matrix times the transpose of ``rotation`` [in, in]; a row's noise is spread evenly."""
        turned, squares = self.columns[:, None] * rotation.T, self.columns**2

        def rotate(chunk: ScaledRows) -> ScaledRows:
            variance = chunk.noise_of_rows(squares)[:, None] / len(squares)
            return ScaledRows(chunk.matrix() @ turned, variance, torch.ones_like(chunk.rows))

        return ScaledMatrix(map(rotate, self.chunks), torch.ones_like(self.columns))


@dataclass(frozen=True)
class Sums:
    """Sums over each row, or each column, of two matrices a and b; float64 [n], n rows or columns."""

    aa: Tensor
    ab: Tensor
    bb: Tensor
    bb_noise: Tensor
    """Sums of b * b * v, where v is the variance that rounding gives a - b: the variance of <b, a - b>.

    Storage in bfloat16 is left out: it adds at most 0.003 to a gain's error, a tenth of the tightest bound.
    """

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sums":
        return Sums(*map(function, vars(self).values()))

    def gains(self) -> Tensor:
        """Return the gain g of every row or column in a = g * b + noise, [n].

        Least squares of a on b underestimates it if b is noisy, and of b on a overestimates it. The value
        between them that is nearest 1 is returned. Rows with more noise than signal get exactly 1.
        """
        low = self.ab / self.bb
        high = torch.where(self.ab > 0, self.aa / self.ab, low)
        gain = torch.ones_like(low).clamp(torch.minimum(low, high), torch.maximum(low, high))
        return torch.where(self.bb > 0, gain, torch.where(self.aa > 0, torch.inf, 1.0))


@dataclass(frozen=True)
class MatrixSums:
    rows: Sums
    columns: Sums
    noise: Tensor
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
    of_rows, of_columns = (Sums(aa, ab, bb, aabb + bbbb) for aa, ab, bb, aabb, bbbb in (rows, column_sums))
    return MatrixSums(of_rows, of_columns, noise)


def _sums_of_chunk(
    a: ScaledRows, b: ScaledRows, weights: tuple[Tensor, ...], memory: Tensor
) -> tuple[Tensor, Tensor]:
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


@dataclass(frozen=True)
class Excess:
    """One statistic and its bound."""

    what: str
    """Name of the statistic, e.g. ``relative error`` or ``gain error of row 17``."""
    measured: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.measured / self.allowed

    def __str__(self) -> str:
        return f"{self.what} {self.measured:.3g}, allowed {self.allowed:.3g}"


@dataclass(frozen=True)
class MatrixDistance:
    """How far two matrices are apart."""

    error: Excess
    """Relative Frobenius error of the whole matrix."""
    columns: Excess
    """Median gain error of the columns."""
    worst: Excess
    """Statistic with the largest ratio to its bound."""

    @property
    def agrees(self) -> bool:
        return self.worst.ratio <= 1


def judge_matrices(
    sums: MatrixSums,
    head_rows: int | None = None,
    noise_factor: float = NOISE_FACTOR,
    row_gain: float = ROW_GAIN,
    row_numbers: Tensor | None = None,
) -> MatrixDistance:
    """Return how far two matrices are apart; heads of ``head_rows`` rows are also judged one by one.

    ``row_numbers`` int64 [rows] are the rows' numbers in the whole matrix; None: they count from 0.
    """
    rows, noise = sums.rows, sums.noise
    whole = rows.map(lambda term: term.sum(0, keepdim=True))
    error = _error(whole, noise.sum(0, keepdim=True), "relative error", noise_factor)
    columns = _typical_gain(sums.columns)
    candidates = [error, _worst_gain(rows, row_gain, row_numbers), columns]
    if head_rows and len(rows.aa) > head_rows:
        size = (-1, head_rows)
        heads = rows.map(lambda term: term.unflatten(0, size).sum(1))
        head_noise = noise.unflatten(0, size).sum(1)
        candidates.append(_error(heads, head_noise, "relative error of head", noise_factor))
    return MatrixDistance(error, columns, max(candidates, key=lambda e: e.ratio))


def _error(sums: Sums, noise: Tensor, what: str, noise_factor: float) -> Excess:
    """Return |a - b| / |b| and its bound, ``noise_factor`` times the noise, for the worst part."""
    size = sums.bb.clamp_min(TINY)
    measured = ((sums.aa - 2 * sums.ab + sums.bb).clamp_min(0) / size).sqrt()
    allowed = (noise_factor * (noise / size).sqrt()).clamp(1e-12, ERROR_CAP)
    worst = int((measured / allowed).argmax())
    name = what if len(measured) == 1 else f"{what} {worst}"
    return Excess(name, float(measured[worst]), float(allowed[worst]))


def unexplained_gains(rows: Sums) -> Tensor:
    """Return the gain of each row, [rows]; 1 for rows whose gain noise explains."""
    gains = rows.gains()
    return torch.where((gains - 1).abs() > _allowed_gain(rows, ROW_GAIN), gains, 1.0)


def _allowed_gain(rows: Sums, band: float) -> Tensor:
    return (ROW_GAIN_SIGMAS * _gain_sigma(rows)).clamp_min(band)


def _worst_gain(rows: Sums, band: float, numbers: Tensor | None) -> Excess:
    """Return |gain - 1| and its bound for the row whose gain noise explains least."""
    off = (rows.gains() - 1).abs()
    allowed = _allowed_gain(rows, band)
    worst = int((off / allowed).argmax())
    number = worst if numbers is None else int(numbers[worst])
    return Excess(f"gain error of row {number}", float(off[worst]), float(allowed[worst]))


def _typical_gain(columns: Sums) -> Excess:
    """Return the median |gain - 1| of the columns and its bound."""
    off = (columns.gains() - 1).abs().median()
    allowed = (COLUMN_GAIN_SIGMAS * _gain_sigma(columns).median()).clamp_min(COLUMN_GAIN)
    return Excess("median gain error of the columns", float(off), float(allowed))


def _gain_sigma(sums: Sums) -> Tensor:
    """Return the standard deviation that rounding noise gives each least-squares gain, [n]."""
    return sums.bb_noise.sqrt() / sums.bb.clamp_min(TINY)
