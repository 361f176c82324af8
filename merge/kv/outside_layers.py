# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare two variants outside of their layers: the basis of the residual stream, and how logits are made.

QuaRot and SpinQuant rotate the whole stream: with the norms folded away, every vector x becomes x Q and
the model computes the same logits. K and V do not change, but their matrices do. So every token's embedding
is compared. If at least half of the tokens differ, the orthogonal Q that best maps one variant's embeddings
to the other's (Procrustes) is computed from a sample of them. If Q maps it up to rounding, K and V can be
compared in the reference's basis.

A fold moves the final norm's weight into the lm_head's columns (QuaRot), so neither is compared by itself.
The norm runs in transformers' code for both variants; the factors between its outputs are multiplied out of
the lm_head's columns, and what is left may differ by rounding alone.
"""

from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from flexquant.merge.kv import agreement
from flexquant.merge.kv.layer_pass import column_factors, excess
from flexquant.merge.kv.variant_weights import VariantWeights, unequal

EMBEDDING_TOLERANCE = 0.02
"""Allowed relative error of an embedding: five times that of bfloat16 storage (two of 2^-8 / sqrt(3))."""

SMALL_TOKEN = 0.01
"""Least size of an embedding, as a share of the typical size; embeddings never trained are almost zero."""
ROTATED = 0.5
"""Share of differing tokens from which on a rotation is assumed, rather than further training."""

CROSS_WEIGHTS = 1 << 23
"""Numbers in a chunk of embeddings, 32 MiB per variant; each chunk costs a hidden x hidden sum."""


@dataclass(frozen=True)
class ResidualBasis:
    """The rotation from the reference's residual stream to a variant's: x = x_reference @ rotation."""

    difference: str = ""
    """How the token embeddings differ; empty if they do not."""
    rotation: torch.Tensor | None = None
    """float32 [hidden, hidden]; None if the embeddings agree without one, or with none at all."""


def compare_bases(variant: VariantWeights, reference: VariantWeights, pool: Executor) -> ResidualBasis:
    """Compare the token embeddings of two variants, a chunk at a time.

    A thread of ``pool`` compares them without a rotation; the rotation is computed on all cores.
    """
    if not any(unequal(*(of.stored(of.embeddings_name) for of in (variant, reference)))):
        return ResidualBasis()
    apart, allowed, size, variant_size = pool.submit(_compare_tokens, variant, reference).result()
    ratios = apart / allowed
    worst = int(ratios.argmax())
    if ratios[worst] <= 1:
        return ResidualBasis()
    share = float((ratios > 1).double().mean())
    one = float(apart[worst] / size[worst].clamp_min(agreement.TINY))
    token = f"the embedding of token {worst} by {one:.3g}, allowed {one / float(ratios[worst]):.3g}"
    if share < ROTATED:
        return ResidualBasis(f"{share:.2%} of the token embeddings differ, {token}")
    left, singular, right = torch.linalg.svd(_cross(variant, reference))
    sample = agreement.row_numbers(variant.embedding_sample())
    squares, other, bounds = (float(of[sample].square().sum()) for of in (size, variant_size, allowed))
    # |A - B Q|^2 = |A|^2 + |B|^2 - 2 <B^T A, Q>; for the best Q, <B^T A, Q> is the nuclear norm of B^T A.
    rotated = max(0.0, squares + other - 2 * float(singular.sum(dtype=torch.float64)))
    error, bound = ((square / max(squares, agreement.TINY)) ** 0.5 for square in (rotated, bounds))
    difference = f"the token embeddings differ, {token}, and all of them by {error:.3g}"
    if error > bound:
        return ResidualBasis(f"{difference} even after the best rotation, allowed {bound:.3g}")
    return ResidualBasis(f"{difference} after a rotation", left @ right)


def _compare_tokens(
    variant: VariantWeights, reference: VariantWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each token's |a - b|, the most of it that rounding explains, |b| and |a|; float64 [tokens]."""
    squares: list[torch.Tensor] = []
    for a, b in zip(*(of.matrix(of.embeddings_name).chunks for of in (variant, reference)), strict=True):
        x, y = a.matrix(), b.matrix()
        terms = (x - y) ** 2, y**2, x**2, a.variances() + b.variances()
        squares.append(torch.stack([term.sum(1, dtype=torch.float64) for term in terms]))
    apart, size, variant_size, noise = torch.cat(squares, dim=1).sqrt()
    typical = size.square().mean().sqrt().clamp_min(agreement.TINY)
    bound = EMBEDDING_TOLERANCE * torch.maximum(size, SMALL_TOKEN * typical)
    allowed = torch.maximum(bound, agreement.NOISE_FACTOR * noise)
    return apart.nan_to_num(nan=torch.inf), allowed, size, variant_size


def _cross(variant: VariantWeights, reference: VariantWeights) -> torch.Tensor:
    """Return B^T A [hidden, hidden] for a sample of the embeddings, B the reference's and A the variant's."""
    chunks = [
        of.matrix(of.embeddings_name, of.embedding_sample(), chunk_weights=CROSS_WEIGHTS).chunks
        for of in (variant, reference)
    ]
    cross: torch.Tensor | None = None
    for a, b in zip(*chunks, strict=True):
        x, y = a.matrix(), b.matrix()
        cross = y.T @ x if cross is None else cross.addmm_(y.T, x)
    assert cross is not None
    return cross


def logits_difference(
    variant: VariantWeights, reference: VariantWeights, rotation: torch.Tensor | None
) -> str:
    """Return how two variants make other logits of one last layer's output; empty if they do not.

    ``rotation`` [hidden, hidden] is that of the variant's residual stream.
    """
    both, skeleton = (variant, reference), reference.skeleton
    norms = [of.outside(skeleton.after_layers) for of in both]
    heads = [of.stored(of.head_name) for of in both]
    for of in both:
        if of.reader.is_quantised(of.head_name):
            of.reader.open(of.head_name)  # raises for scales that are not finite
    are_equal = [not any(unequal(a, b)) for a, b in (norms, heads)]
    if all(are_equal) and rotation is None:
        return ""
    hidden = skeleton.hidden(len(skeleton.layers) - 1)[0]
    if len(skeleton.after_layers) == 1 and not skeleton.stands_in:
        x = skeleton.run_last(variant.load_last(), hidden if rotation is None else hidden @ rotation)
        expected = skeleton.run_last(reference.load_last(), hidden)
    elif are_equal[0] and rotation is None:
        x = expected = hidden
    else:
        return f"'{min(norms[1], default='what follows the layers')}' is not equal in both"
    if rotation is not None:
        x = x @ rotation.T
    factors = column_factors(x, expected)
    rounding = agreement.STORAGE_NOISE * reference.load_last().get("bias", torch.zeros(1)).abs()
    if excess(x, factors * expected, rounding) > 1:
        return f"{skeleton.after_layers[0]}, behind the layers, computes something else"
    matrix, other = variant.matrix(variant.head_name), reference.matrix(reference.head_name)
    matrix = matrix if rotation is None else matrix.rotated(rotation)
    sums = agreement.sum_products(matrix.times_columns(factors), other)
    found = agreement.judge_matrices(sums, None, agreement.OUTPUT_NOISE_FACTOR)
    if found.agrees:
        return ""
    return f"{reference.head_name}, with the norm before it, makes other logits ({found.worst})"
