# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do two matrices differ by quantisation noise only? The statistics and their bounds.

Four numbers are compared with what quantisation explains; `compatibility` says why these four and how the
bounds were found. They follow from the noise variance that `dequantize` predicts, so they widen for INT4
and tighten for INT8. All four come from `sums`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexquant.merge.kv.sums import MatrixSums, Sums

NOISE_FACTOR = 4.0
"""K and V may err by this many times the norm of the predicted rounding noise."""
ERROR_CAP = 0.8
"""No matrix may err by more than this share of its norm, however noisy it is; unrelated ones err by 1.41."""
ROW_GAIN = 0.1
"""The gain of any row of K or V may be off by this share."""
ROW_GAIN_SIGMAS = 8.0
"""It may be off by this many standard deviations of what noise does to a gain, where that is more."""
COLUMN_GAIN = 0.03
"""The median gain of the columns may be off by this share."""
COLUMN_GAIN_SIGMAS = 4.0
"""It may be off by this many standard deviations of what noise does to a gain, where that is more."""
OUTPUT_NOISE_FACTOR = 6.0
"""o_proj and down_proj may err by this many times the noise; massive activations let GPTQ bend them more."""
OUTPUT_ROW_GAIN = 0.25
"""The gain of any row of o_proj or down_proj may be off by this share, for the same reason."""
TINY = 1e-30
"""Stands for the size of a matrix of zeros in divisions."""


@dataclass(frozen=True)
class Excess:
    """One statistic and its bound."""

    what: str
    """E.g. ``relative error`` or ``gain of row 17``."""
    measured: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.measured / self.allowed

    def __str__(self) -> str:
        return f"{self.what} {self.measured:.3g}, allowed {self.allowed:.3g}"


@dataclass(frozen=True)
class Agreement:
    """How far two matrices are apart."""

    error: Excess
    """Relative Frobenius error of the whole matrix."""
    columns: Excess
    """The median gain error of the columns."""
    worst: Excess
    """The statistic that is closest to its bound, or farthest beyond it."""

    @property
    def agrees(self) -> bool:
        return self.worst.ratio <= 1


def judge(
    sums: MatrixSums,
    head_rows: int | None = None,
    noise_factor: float = NOISE_FACTOR,
    row_gain: float = ROW_GAIN,
    row_numbers: torch.Tensor | None = None,
) -> Agreement:
    """Say how far two matrices are apart, and their heads of ``head_rows`` rows by themselves too.

    ``row_numbers`` are those of the rows, int64 [rows], where they do not count from 0.
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
    return Agreement(error, columns, max(candidates, key=lambda e: e.ratio))


def _error(sums: Sums, noise: torch.Tensor, what: str, noise_factor: float) -> Excess:
    """|a - b| / |b| against ``noise_factor`` times the noise, of the row or head that is worst."""
    size = sums.bb.clamp_min(TINY)
    measured = ((sums.aa - 2 * sums.ab + sums.bb).clamp_min(0) / size).sqrt()
    allowed = (noise_factor * (noise / size).sqrt()).clamp(1e-12, ERROR_CAP)
    worst = int((measured / allowed).argmax())
    name = what if len(measured) == 1 else f"{what} {worst}"
    return Excess(name, float(measured[worst]), float(allowed[worst]))


def unexplained_gains(rows: Sums) -> torch.Tensor:
    """Return the gain of each row where noise does not explain it, and 1 elsewhere, [rows]."""
    gains = rows.gains()
    return torch.where((gains - 1).abs() > _allowed_gain(rows, ROW_GAIN), gains, 1.0)


def _allowed_gain(rows: Sums, band: float) -> torch.Tensor:
    return (ROW_GAIN_SIGMAS * _gain_sigma(rows)).clamp_min(band)


def _worst_gain(rows: Sums, band: float, numbers: torch.Tensor | None) -> Excess:
    """|gain - 1| of the row whose gain is least explained by noise."""
    off = (rows.gains() - 1).abs()
    allowed = _allowed_gain(rows, band)
    worst = int((off / allowed).argmax())
    number = worst if numbers is None else int(numbers[worst])
    return Excess(f"gain error of row {number}", float(off[worst]), float(allowed[worst]))


def _typical_gain(columns: Sums) -> Excess:
    """The median |gain - 1| of the columns."""
    off = (columns.gains() - 1).abs().median()
    allowed = (COLUMN_GAIN_SIGMAS * _gain_sigma(columns).median()).clamp_min(COLUMN_GAIN)
    return Excess("median gain error of the columns", float(off), float(allowed))


def _gain_sigma(sums: Sums) -> torch.Tensor:
    """Return the standard deviation that rounding noise gives each least-squares gain, [n]."""
    return sums.bb_noise.sqrt() / sums.bb.clamp_min(TINY)
