# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""In which basis does a checkpoint keep its residual stream? Its token embeddings tell.

QuaRot and SpinQuant rotate the whole stream: with the norms folded away, every vector x becomes x Q and
the model computes the same logits. K and V stay as they were, but their matrices do not. So every token's
embedding is compared. If hardly any token agrees, the orthogonal Q that maps one variant's embeddings to the
other's best (Procrustes) is computed from a sample of the tokens, at least four for each number that the
rotation of a row has (`sampling`). If Q maps the sample exactly, K and V can be compared in the reference's
basis; one token in the sample that was trained further is then not seen.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from flexquant.checkpoint.safetensors_io import same_bytes
from flexquant.merge.kv.agreement import NOISE_FACTOR, TINY
from flexquant.merge.kv.sampling import row_numbers
from flexquant.merge.kv.variant_weights import VariantWeights

EMBEDDING_TOLERANCE = 0.02
"""Relative error that bfloat16 storage explains, five times over (a rotated row: 2^-8 / sqrt(3) twice)."""

SMALL_TOKEN = 0.01
"""A token's embedding counts at least this share of the typical size: those never trained are almost zero."""
ROTATED = 0.5
"""The embeddings are rotated, and not trained further, if at least this share of the tokens differs."""

CROSS_WEIGHTS = 1 << 23
"""Numbers of embeddings multiplied at a time, 32 MiB of each variant: every product is hidden x hidden."""


@dataclass(frozen=True)
class ResidualBasis:
    """How the residual stream of a variant lies to the reference's: x = x_reference @ rotation."""

    difference: str = ""
    """Why the token embeddings are not the same; empty when they are."""
    rotation: torch.Tensor | None = None
    """[hidden, hidden] float32; None where the embeddings agree as they are, or after no rotation."""

    @property
    def same(self) -> bool:
        return not self.difference

    @property
    def related(self) -> bool:
        return self.same or self.rotation is not None


def compare_bases(variant: VariantWeights, reference: VariantWeights, pool: Executor) -> ResidualBasis:
    """Compare the token embeddings of two variants; they are streamed, only hidden x hidden is held.

    The embeddings as they are are compared in a thread of ``pool`` (`workers`), their rotation is found with
    all cores.
    """
    a, b = (of.stored(of.embeddings_name) for of in (variant, reference))
    if a.keys() == b.keys() and all(same_bytes(a[name], b[name]) for name in a):
        return ResidualBasis()
    tokens = pool.submit(_compare_tokens, variant, reference).result()
    ratios = tokens.apart / tokens.allowed
    worst = int(ratios.argmax())
    if ratios[worst] <= 1:
        return ResidualBasis()
    share = float((ratios > 1).double().mean())
    one = float(tokens.apart[worst] / tokens.size[worst].clamp_min(TINY))
    token = f"the embedding of token {worst} by {one:.3g}, allowed {one / float(ratios[worst]):.3g}"
    if share < ROTATED:
        return ResidualBasis(f"{share:.2%} of the token embeddings differ, {token}")
    left, singular, right = torch.linalg.svd(_cross(variant, reference))
    sample = row_numbers(variant.embedding_sample())
    size, other, allowed = (
        float(of[sample].square().sum()) for of in (tokens.size, tokens.variant_size, tokens.allowed)
    )
    # |A - B Q|^2 = |A|^2 + |B|^2 - 2 <B^T A, Q>, and the best Q makes the last term the nuclear norm
    rotated = max(0.0, size + other - 2 * float(singular.sum(dtype=torch.float64)))
    error, bound = ((square / max(size, TINY)) ** 0.5 for square in (rotated, allowed))
    if error > bound:
        return ResidualBasis(
            f"the token embeddings differ, {token}, and all of them by {error:.3g} even after the best "
            f"rotation, allowed {bound:.3g}"
        )
    return ResidualBasis(
        f"the token embeddings differ, {token}, and all of them by {error:.3g} after a rotation",
        left @ right,
    )


@dataclass(frozen=True)
class _Tokens:
    """The embeddings a of the variant and b of the reference, by token; all float64 [tokens]."""

    apart: torch.Tensor
    """|a - b|"""
    allowed: torch.Tensor
    """What rounding explains of it."""
    size: torch.Tensor
    """|b|"""
    variant_size: torch.Tensor
    """|a|"""


def _compare_tokens(variant: VariantWeights, reference: VariantWeights) -> _Tokens:
    squares: list[torch.Tensor] = []
    for a, b in zip(variant.embeddings().chunks, reference.embeddings().chunks, strict=True):
        x, y = a.matrix(), b.matrix()
        noise = a.variances() + b.variances()
        squares.append(
            torch.stack([t.sum(1, dtype=torch.float64) for t in ((x - y) ** 2, y**2, x**2, noise)])
        )
    apart, size, variant_size, noise = torch.cat(squares, dim=1).sqrt()
    typical = size.square().mean().sqrt().clamp_min(TINY)
    allowed = torch.maximum(
        EMBEDDING_TOLERANCE * torch.maximum(size, SMALL_TOKEN * typical), NOISE_FACTOR * noise
    )
    return _Tokens(apart.nan_to_num(nan=torch.inf), allowed, size, variant_size)


def _cross(variant: VariantWeights, reference: VariantWeights) -> torch.Tensor:
    """Return B^T A of the embeddings B of the reference and A of the variant, [hidden, hidden]."""
    chunks = [m.embeddings(m.embedding_sample(), CROSS_WEIGHTS).chunks for m in (variant, reference)]
    cross: torch.Tensor | None = None
    for a, b in zip(*chunks, strict=True):
        x, y = a.matrix(), b.matrix()
        cross = y.T @ x if cross is None else cross.addmm_(y.T, x)
    assert cross is not None
    return cross
