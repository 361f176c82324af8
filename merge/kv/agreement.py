# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Judge whether two matrices differ by quantisation noise only.

Four statistics, all computed from the sums of `scaled_rows`, are compared with bounds; `compatibility` says
why these four and how the bounds were found. The bounds follow from the noise variance that `dequantize`
predicts, so they are wider for INT4 than for INT8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexquant.merge.kv.scaled_rows import MatrixSums, Sums

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
    row_numbers: torch.Tensor | None = None,
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


def _error(sums: Sums, noise: torch.Tensor, what: str, noise_factor: float) -> Excess:
    """Return |a - b| / |b| and its bound, ``noise_factor`` times the noise, for the worst part."""
    size = sums.bb.clamp_min(TINY)
    measured = ((sums.aa - 2 * sums.ab + sums.bb).clamp_min(0) / size).sqrt()
    allowed = (noise_factor * (noise / size).sqrt()).clamp(1e-12, ERROR_CAP)
    worst = int((measured / allowed).argmax())
    name = what if len(measured) == 1 else f"{what} {worst}"
    return Excess(name, float(measured[worst]), float(allowed[worst]))


def unexplained_gains(rows: Sums) -> torch.Tensor:
    """Return the gain of each row, [rows]; 1 for rows whose gain noise explains."""
    gains = rows.gains()
    return torch.where((gains - 1).abs() > _allowed_gain(rows, ROW_GAIN), gains, 1.0)


def _allowed_gain(rows: Sums, band: float) -> torch.Tensor:
    return (ROW_GAIN_SIGMAS * _gain_sigma(rows)).clamp_min(band)


def _worst_gain(rows: Sums, band: float, numbers: torch.Tensor | None) -> Excess:
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


def _gain_sigma(sums: Sums) -> torch.Tensor:
    """Return the standard deviation that rounding noise gives each least-squares gain, [n]."""
    return sums.bb_noise.sqrt() / sums.bb.clamp_min(TINY)
