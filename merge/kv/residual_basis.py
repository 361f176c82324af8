# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""In which basis does a checkpoint keep its residual stream? Its token embeddings tell.

QuaRot and SpinQuant rotate the whole stream: with the norms folded away, every vector x becomes x Q and
the model computes the same logits. K and V stay as they were, but their matrices do not. So where the
embeddings differ, the orthogonal Q that maps one to the other best (Procrustes) is computed; if it maps
them exactly, K and V can be compared in the reference's basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexquant.checkpoint.safetensors_io import same_bytes
from flexquant.merge.kv.agreement import NOISE_FACTOR
from flexquant.merge.kv.effective_maps import EffectiveMaps

EMBEDDING_TOLERANCE = 0.02
"""Relative error that bfloat16 storage explains, five times over (a rotated row: 2^-8 / sqrt(3) twice)."""


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


def compare_bases(maps: EffectiveMaps, reference: EffectiveMaps) -> ResidualBasis:
    """Compare the token embeddings of two variants; they are streamed, only hidden x hidden is held."""
    name = f"{reference.root}embed_tokens.weight"
    a_ref, b_ref = maps.source.tensors.get(name), reference.source.tensors.get(name)
    if a_ref is not None and b_ref is not None and same_bytes(a_ref, b_ref):
        return ResidualBasis(0.0, 0.0, EMBEDDING_TOLERANCE, None)
    cross: torch.Tensor | None = None
    aa = bb = noise = diff = 0.0
    for a, b in zip(maps.embedding_chunks(), reference.embedding_chunks(), strict=True):
        product = b.weight.T @ a.weight  # [hidden, hidden]
        cross = product if cross is None else cross.add_(product)
        aa += _energy(a.weight)
        bb += _energy(b.weight)
        diff += _energy(a.weight - b.weight)
        noise += float((a.variance + b.variance).expand_as(a.weight).sum(dtype=torch.float64))
    assert cross is not None
    size = max(bb, 1e-30)
    direct = (diff / size) ** 0.5
    allowed = max(EMBEDDING_TOLERANCE, NOISE_FACTOR * (noise / size) ** 0.5)
    if direct <= allowed:
        return ResidualBasis(direct, direct, allowed, None)
    left, singular, right = torch.linalg.svd(cross)
    # |A - B Q|^2 = |A|^2 + |B|^2 - 2 <B^T A, Q>, and the best Q makes the last term the nuclear norm
    rotated = max(0.0, aa + bb - 2 * float(singular.sum(dtype=torch.float64)))
    return ResidualBasis(direct, (rotated / size) ** 0.5, allowed, left @ right)


def _energy(x: torch.Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
