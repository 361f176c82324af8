# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do two matrices differ by quantisation noise only? The statistics, row chunk by row chunk.

Four numbers are compared with what quantisation explains; `compatibility` says why these four and how the
bounds were found. They follow from the noise variance that `dequantize` predicts, so they widen for INT4
and tighten for INT8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

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
STORAGE_NOISE = 2.0**-8
"""A fold that is stored in bfloat16 before quantising errs by this share of each value."""
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
    worst: Excess
    """The statistic that is closest to its bound, or farthest beyond it."""

    @property
    def agrees(self) -> bool:
        return self.worst.ratio <= 1


@dataclass(frozen=True)
class Sums:
    """Sums over each row, or each column, of two matrices a and b; float64 [n], n rows or columns."""

    aa: torch.Tensor
    """Of a * a."""
    ab: torch.Tensor
    """Of a * b."""
    bb: torch.Tensor
    """Of b * b."""
    noise: torch.Tensor
    """Of the variance of a - b that rounding explains."""
    bb_noise: torch.Tensor
    """Of b * b times that variance: the variance of <b, noise>."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Sums:
        return Sums(*(function(getattr(self, f.name)) for f in fields(self)))

    def plus(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Sums]) -> Sums:
        """Return the sums of all rows, given those of consecutive rows."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def gains(self) -> torch.Tensor:
        """Return the gain g of every row or column in a = g * b + noise, [n].

        Least squares of a on b underestimates the gain where b is noisy, and b on a overestimates it. The
        true one lies between, and as quantisation is to be the explanation where it can, the one nearest 1
        is returned: exactly 1 for rows that are drowned in noise.
        """
        low = self.ab / self.bb
        high = torch.where(self.ab > 0, self.aa / self.ab, low)
        gain = torch.ones_like(low).clamp(torch.minimum(low, high), torch.maximum(low, high))
        return torch.where(self.bb > 0, gain, torch.where(self.aa > 0, torch.inf, 1.0))

    def gain_sigma(self) -> torch.Tensor:
        """Return the standard deviation that rounding noise gives a least-squares gain, [n]."""
        return self.bb_noise.sqrt() / self.bb.clamp_min(TINY)


class Comparison:
    """Accumulates the statistics of ``a`` against ``b`` over chunks of rows of [rows, columns] float32."""

    def __init__(
        self, head_rows: int | None = None, noise_factor: float = NOISE_FACTOR, row_gain: float = ROW_GAIN
    ) -> None:
        self._head_rows, self._noise_factor, self._row_gain = head_rows, noise_factor, row_gain
        self._rows: list[Sums] = []
        self._columns: Sums | None = None

    def add(self, a: torch.Tensor, a_var: torch.Tensor, b: torch.Tensor, b_var: torch.Tensor) -> None:
        """Add matching rows; the variances broadcast to the weights."""
        square = b * b
        noise = a_var + b_var + square * (2 * STORAGE_NOISE**2 / 3)
        terms = Sums(a * a, a * b, square, noise, square * noise)
        self._rows.append(terms.map(lambda term: term.sum(1).double()))
        columns = terms.map(lambda term: term.sum(0).double())
        self._columns = columns if self._columns is None else self._columns.plus(columns)

    def row_gains(self) -> torch.Tensor:
        """Return the factor of every row of ``a`` on the same row of ``b``, float32 [rows]."""
        return Sums.joined(self._rows).gains().float()

    def result(self) -> Agreement:
        assert self._columns is not None
        rows = Sums.joined(self._rows)
        error = _error(rows.map(lambda term: term.sum(0, keepdim=True)), "relative error", self._noise_factor)
        candidates = [error, _worst_gain(rows, self._row_gain), _typical_gain(self._columns)]
        if self._head_rows and len(rows.aa) > self._head_rows:
            size = (-1, self._head_rows)
            heads = rows.map(lambda term: term.unflatten(0, size).sum(1))
            candidates.append(_error(heads, "relative error of head", self._noise_factor))
        return Agreement(error, max(candidates, key=lambda e: e.ratio))


def _error(sums: Sums, what: str, noise_factor: float) -> Excess:
    """|a - b| / |b| against ``noise_factor`` times the noise, of the row or head that is worst."""
    size = sums.bb.clamp_min(TINY)
    measured = ((sums.aa - 2 * sums.ab + sums.bb).clamp_min(0) / size).sqrt()
    allowed = (noise_factor * (sums.noise / size).sqrt()).clamp(1e-12, ERROR_CAP)
    worst = int((measured / allowed).argmax())
    name = what if len(measured) == 1 else f"{what} {worst}"
    return Excess(name, float(measured[worst]), float(allowed[worst]))


def _worst_gain(rows: Sums, band: float) -> Excess:
    """|gain - 1| of the row whose gain is least explained by noise."""
    off = (rows.gains() - 1).abs()
    allowed = (ROW_GAIN_SIGMAS * rows.gain_sigma()).clamp_min(band)
    worst = int((off / allowed).argmax())
    return Excess(f"gain error of row {worst}", float(off[worst]), float(allowed[worst]))


def _typical_gain(columns: Sums) -> Excess:
    """The median |gain - 1| of the columns."""
    off = (columns.gains() - 1).abs().median()
    allowed = (COLUMN_GAIN_SIGMAS * columns.gain_sigma().median()).clamp_min(COLUMN_GAIN)
    return Excess("median gain error of the columns", float(off), float(allowed))
