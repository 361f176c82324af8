# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do two matrices differ by quantisation noise only? The statistics, row chunk by row chunk.

Four numbers are compared with what quantisation explains; `kv_compat` says why these four and how the
bounds were found. They follow from the noise variance that `dequantize` predicts, so they widen for INT4
and tighten for INT8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOISE_FACTOR = 4.0
"""Allowed error norm, as a multiple of the predicted rounding noise ..."""
ERROR_CAP = 0.8
"""... and never more than this share of the weight: unrelated matrices differ by 1.41."""
ROW_GAIN, ROW_GAIN_SIGMAS = 0.1, 8.0
"""Allowed gain error of any row of K or V: this, or so many standard deviations of the predicted noise."""
COLUMN_GAIN, COLUMN_GAIN_SIGMAS = 0.03, 4.0
"""The same for the median over the columns."""
OUTPUT_NOISE_FACTOR, OUTPUT_ROW_GAIN = 6.0, 0.25
"""For o_proj and down_proj: massive activations let GPTQ bend these further."""
STORAGE_NOISE = 2.0**-8
"""Relative error of folds that are stored in bfloat16 before quantising."""


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
    worst: Excess
    """The statistic that is closest to its bound, or farthest beyond it."""

    @property
    def agrees(self) -> bool:
        return self.worst.ratio <= 1


class Comparison:
    """Accumulates the statistics of ``a`` against ``b`` over chunks of rows of [rows, columns] float32."""

    def __init__(
        self, head_rows: int | None = None, noise_factor: float = NOISE_FACTOR, row_gain: float = ROW_GAIN
    ) -> None:
        self._head_rows, self._noise_factor, self._row_gain = head_rows, noise_factor, row_gain
        self._rows: list[torch.Tensor] = []  # [5, rows of the chunk]
        self._columns: torch.Tensor | None = None  # [5, columns]

    def add(self, a: torch.Tensor, a_var: torch.Tensor, b: torch.Tensor, b_var: torch.Tensor) -> None:
        """Add matching rows; the variances broadcast to the weights."""
        square = b * b
        noise = a_var + b_var + square * (2 * STORAGE_NOISE**2 / 3)
        # <a,a>, <a,b>, <b,b>, energy of the noise, variance of <b, noise>
        terms = (a * a, a * b, square, noise, square * noise)
        self._rows.append(torch.stack([t.sum(1) for t in terms]).double())
        columns = torch.stack([t.sum(0) for t in terms]).double()
        self._columns = columns if self._columns is None else self._columns + columns

    def row_gains(self) -> torch.Tensor:
        """Return the factor of every row of ``a`` on the same row of ``b``, float32 [rows]."""
        return gains(torch.cat(self._rows, dim=1)).float()

    def result(self) -> Agreement:
        assert self._columns is not None
        rows = torch.cat(self._rows, dim=1)
        error = _error(rows.sum(1, keepdim=True), "relative error", self._noise_factor)
        candidates = [error, _worst_gain(rows, self._row_gain), _typical_gain(self._columns)]
        if self._head_rows and rows.shape[1] > self._head_rows:
            heads = rows.unflatten(1, (-1, self._head_rows)).sum(2)
            candidates.append(_error(heads, "relative error of head", self._noise_factor))
        return Agreement(error, max(candidates, key=lambda e: e.ratio))


def gains(sums: torch.Tensor) -> torch.Tensor:
    """Return the gain g of every row or column in a = g * b + noise; ``sums`` [5, n] -> [n].

    Least squares of a on b underestimates the gain where b is noisy, and b on a overestimates it. The true
    one lies between, and as quantisation is to be the explanation where it can, the one nearest 1 is
    returned: exactly 1 for rows that are drowned in noise.
    """
    aa, ab, bb, _, _ = sums
    low = ab / bb
    high = torch.where(ab > 0, aa / ab, low)
    gain = torch.ones_like(low).clamp(torch.minimum(low, high), torch.maximum(low, high))
    return torch.where(bb > 0, gain, torch.where(aa > 0, torch.inf, 1.0))


def _error(sums: torch.Tensor, what: str, noise_factor: float) -> Excess:
    """|a - b| / |b| against ``noise_factor`` times the noise; the worst column of ``sums`` [5, n]."""
    aa, ab, bb, noise, _ = sums
    size = bb.clamp_min(1e-30)
    measured = ((aa - 2 * ab + bb).clamp_min(0) / size).sqrt()
    allowed = (noise_factor * (noise / size).sqrt()).clamp(1e-12, ERROR_CAP)
    worst = int((measured / allowed).argmax())
    name = what if sums.shape[1] == 1 else f"{what} {worst}"
    return Excess(name, float(measured[worst]), float(allowed[worst]))


def _worst_gain(rows: torch.Tensor, band: float) -> Excess:
    """|gain - 1| of the row whose gain is least explained by noise; ``rows`` [5, n]."""
    off = (gains(rows) - 1).abs()
    allowed = (ROW_GAIN_SIGMAS * _gain_sigma(rows)).clamp_min(band)
    worst = int((off / allowed).argmax())
    return Excess(f"gain error of row {worst}", float(off[worst]), float(allowed[worst]))


def _typical_gain(columns: torch.Tensor) -> Excess:
    """The median |gain - 1| of the columns; ``columns`` [5, n]."""
    off = (gains(columns) - 1).abs().median()
    allowed = (COLUMN_GAIN_SIGMAS * _gain_sigma(columns).median()).clamp_min(COLUMN_GAIN)
    return Excess("median gain error of the columns", float(off), float(allowed))


def _gain_sigma(sums: torch.Tensor) -> torch.Tensor:
    """Standard deviation that rounding noise gives a least-squares gain."""
    return sums[4].sqrt() / sums[2].clamp_min(1e-30)
