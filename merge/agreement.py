# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do two matrices differ by quantisation noise only? The statistics, row chunk by row chunk.

Four numbers are compared with what rounding explains; `kv_compat` says why these four. All bounds follow
from the noise variance that `dequantize` predicts, so they widen for INT4 and tighten for INT8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOISE_FACTOR = 4.0
"""Allowed error norm, as a multiple of the predicted rounding noise."""
ERROR_CAP = 0.8
"""Never allow more: unrelated matrices differ by 1.41."""
GAIN_SIGMAS = 8.0
"""Allowed gain error of a row or column, in standard deviations of the predicted noise ..."""
GAIN_BAND = 0.1
"""... and never less than this."""
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

    def __init__(self, head_rows: int | None = None) -> None:
        self._head_rows = head_rows
        self._rows: list[torch.Tensor] = []  # [6, rows of the chunk]
        self._columns: torch.Tensor | None = None  # [6, columns]

    def add(self, a: torch.Tensor, a_var: torch.Tensor, b: torch.Tensor, b_var: torch.Tensor) -> None:
        """Add matching rows; the variances broadcast to the weights."""
        square = b * b
        a_noise, b_noise = a_var + square * STORAGE_NOISE**2 / 3, b_var + square * STORAGE_NOISE**2 / 3
        # <a,a>, <a,b>, <b,b>, energy of either noise, variance of <b, noise>
        terms = (a * a, a * b, square, a_noise, b_noise, square * (a_noise + b_noise))
        self._rows.append(torch.stack([t.sum(1, dtype=torch.float64) for t in terms]))
        columns = torch.stack([t.sum(0, dtype=torch.float64) for t in terms])
        self._columns = columns if self._columns is None else self._columns + columns

    def row_gains(self) -> torch.Tensor:
        """Return the factor of every row of ``a`` on the same row of ``b``, float32 [rows]."""
        return gains(torch.cat(self._rows, dim=1)).float()

    def result(self) -> Agreement:
        assert self._columns is not None
        rows = torch.cat(self._rows, dim=1)
        error = _error(rows.sum(1, keepdim=True), "relative error")
        candidates = [error, _gain(rows, "row"), _gain(self._columns, "column")]
        if self._head_rows and rows.shape[1] > self._head_rows:
            heads = rows.unflatten(1, (-1, self._head_rows)).sum(2)
            candidates.append(_error(heads, "relative error of head"))
        return Agreement(error, max(candidates, key=lambda e: e.ratio))


def gains(sums: torch.Tensor) -> torch.Tensor:
    """Return the gain g of every row or column in a = g * b, both noisy; ``sums`` [6, n] -> [n].

    Deming regression: least squares of a on b would underestimate it where b is the noisy one. Only the
    ratio of the two noises matters, so a method that errs by a multiple of rounding does no harm.
    """
    aa, ab, bb, a_noise, b_noise, _ = sums
    x = b_noise * aa - a_noise * bb
    root = (x * x + 4 * a_noise * b_noise * ab * ab).sqrt()
    gain = torch.where(x > 0, (x + root) / (2 * b_noise * ab), 2 * a_noise * ab / (root - x))
    return torch.where((aa == 0) & (bb == 0), 1.0, torch.nan_to_num(gain, nan=0.0, posinf=1e9, neginf=-1e9))


def _error(sums: torch.Tensor, what: str) -> Excess:
    """|a - b| / |b| against NOISE_FACTOR times the noise; the worst column of ``sums`` [6, n]."""
    aa, ab, bb, a_noise, b_noise, _ = sums
    size = bb.clamp_min(1e-30)
    measured = ((aa - 2 * ab + bb).clamp_min(0) / size).sqrt()
    allowed = (NOISE_FACTOR * ((a_noise + b_noise) / size).sqrt()).clamp(1e-12, ERROR_CAP)
    worst = int((measured / allowed).argmax())
    name = what if sums.shape[1] == 1 else f"{what} {worst}"
    return Excess(name, float(measured[worst]), float(allowed[worst]))


def _gain(sums: torch.Tensor, kind: str) -> Excess:
    """|gain - 1| of the row or column whose gain is least explained by noise; ``sums`` [6, n]."""
    bb, a_noise, b_noise, variance = sums[2:]
    size = bb.clamp_min(1e-30)
    off = (gains(sums) - 1).abs()
    noise_share = (a_noise + b_noise) / size
    allowed = (GAIN_SIGMAS * variance.sqrt() / size).clamp_min(GAIN_BAND) + noise_share
    worst = int((off / allowed).argmax())
    return Excess(f"gain error of {kind} {worst}", float(off[worst]), float(allowed[worst]))
