# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""In which basis does a checkpoint keep its residual stream? Its token embeddings tell.

QuaRot and SpinQuant rotate the whole stream: with the norms folded away, every vector x becomes x Q and
the model computes the same logits. K and V stay as they were, but their matrices do not. So where the
embeddings differ, the orthogonal Q that maps one to the other best (Procrustes) is computed; if it maps
them exactly, K and V can be compared in the reference's basis. A sample of the tokens is taken, at least
four for each number that the rotation of a row has (`sampling`).
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from flexquant.merge.kv.agreement import NOISE_FACTOR
from flexquant.merge.kv.variant_weights import VariantWeights

EMBEDDING_TOLERANCE = 0.02
"""Relative error that bfloat16 storage explains, five times over (a rotated row: 2^-8 / sqrt(3) twice)."""

CROSS_WEIGHTS = 1 << 23
"""Numbers of embeddings multiplied at a time, 32 MiB of each variant: every product is hidden x hidden."""


@dataclass(frozen=True)
class ResidualBasis:
    """How the residual stream of a variant lies to the reference's: x = x_reference @ rotation."""

    direct_error: float
    """Relative error of the embeddings as they are."""
    rotated_error: float
    """The same after the best rotation; above ``allowed``, the two streams are unrelated."""
    allowed: float
    rotation: torch.Tensor | None
    """[hidden, hidden] float32; None where the embeddings agree as they are."""

    @property
    def same(self) -> bool:
        return self.direct_error <= self.allowed

    @property
    def related(self) -> bool:
        return self.same or self.rotated_error <= self.allowed


def compare_bases(variant: VariantWeights, reference: VariantWeights, pool: Executor) -> ResidualBasis:
    """Compare the token embeddings of two variants; they are streamed, only hidden x hidden is held.

    The embeddings as they are are compared in a thread of ``pool`` (`workers`), their rotation is found with
    all cores.
    """
    aa, bb, diff, noise = pool.submit(_energies, variant, reference).result()
    size = max(bb, 1e-30)
    direct = (diff / size) ** 0.5
    allowed = max(EMBEDDING_TOLERANCE, NOISE_FACTOR * (noise / size) ** 0.5)
    if direct <= allowed:
        return ResidualBasis(direct, direct, allowed, None)
    left, singular, right = torch.linalg.svd(_cross(variant, reference))
    # |A - B Q|^2 = |A|^2 + |B|^2 - 2 <B^T A, Q>, and the best Q makes the last term the nuclear norm
    rotated = max(0.0, aa + bb - 2 * float(singular.sum(dtype=torch.float64)))
    return ResidualBasis(direct, (rotated / size) ** 0.5, allowed, left @ right)


def _energies(variant: VariantWeights, reference: VariantWeights) -> tuple[float, float, float, float]:
    """Return |A|^2, |B|^2, |A - B|^2 and the rounding noise expected in it, B the reference's embeddings."""
    aa = bb = noise = diff = 0.0
    for a, b in zip(variant.embeddings().chunks, reference.embeddings().chunks, strict=True):
        x, y = a.matrix(), b.matrix()
        aa += _energy(x)
        bb += _energy(y)
        diff += _energy(x - y)
        noise += float((a.variances() + b.variances()).sum(dtype=torch.float64))
    return aa, bb, diff, noise


def _cross(variant: VariantWeights, reference: VariantWeights) -> torch.Tensor:
    """Return B^T A of the embeddings B of the reference and A of the variant, [hidden, hidden]."""
    chunks = [m.embeddings(CROSS_WEIGHTS).chunks for m in (variant, reference)]
    cross: torch.Tensor | None = None
    for a, b in zip(*chunks, strict=True):
        x, y = a.matrix(), b.matrix()
        cross = y.T @ x if cross is None else cross.addmm_(y.T, x)
    assert cross is not None
    return cross


def _energy(x: torch.Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
