# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare what turns the last layer's output into logits: the final norm, and the lm_head behind it.

A fold moves the norm's weight into the lm_head's columns (QuaRot), so neither is compared by itself. The norm
runs in transformers' code for both variants; the factors between its outputs are multiplied out of the
lm_head's columns, and what is left may differ by rounding alone.
"""

from __future__ import annotations

import torch

from flexquant.merge.kv.agreement import OUTPUT_NOISE_FACTOR, judge_matrices
from flexquant.merge.kv.all_else import column_factors, excess
from flexquant.merge.kv.layer_comparison import equal
from flexquant.merge.kv.scaled_rows import STORAGE_NOISE, sum_products
from flexquant.merge.kv.skeleton import Skeleton
from flexquant.merge.kv.variant_weights import VariantWeights


def logits_difference(
    variant: VariantWeights, reference: VariantWeights, skeleton: Skeleton, rotation: torch.Tensor | None
) -> str:
    """Return how two variants make other logits of one last layer's output; empty if they do not.

    ``rotation`` [hidden, hidden] is that of the variant's residual stream.
    """
    both = (variant, reference)
    norms = [of.after_layers() for of in both]
    heads = [of.stored(of.head_name) for of in both]
    are_equal = [
        a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a) for a, b in (norms, heads)
    ]
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
    rounding = STORAGE_NOISE * reference.load_last().get("bias", torch.zeros(1)).abs()
    if excess(x, factors * expected, rounding) > 1:
        return f"{skeleton.after_layers[0]}, behind the layers, computes something else"
    matrix, other = variant.matrix(variant.head_name), reference.matrix(reference.head_name)
    matrix = matrix if rotation is None else matrix.rotated(rotation)
    found = judge_matrices(sum_products(matrix.times_columns(factors), other), None, OUTPUT_NOISE_FACTOR)
    if found.agrees:
        return ""
    return f"{reference.head_name}, with the norm before it, makes other logits ({found.worst})"
