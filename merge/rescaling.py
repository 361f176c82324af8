# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do the linears of variants take the same inputs and give the same outputs? LoRA adapters need that.

SmoothQuant and AWQ move scales from a norm into the linears behind it, or from one linear into the next
(up_proj and down_proj), and rotations turn both. The model stays the same, but not what an adapter adds to.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexquant.checkpoint.module_names import EXPERTS, decoder_layer
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError

ROWS = 32
"""Compared of each linear, the first ones: whatever is scaled or turned, it shows in most rows."""
BOUND = 0.1
"""By how much a row's gain is off, in the median. GPTQ reaches 0.1 in the worst row of a model."""


def find_rescaled(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the names of the sources of which a linear is scaled or turned against the first one's.

    Linears whose schemes are not understood, or whose weights are no numbers, are passed over.
    """
    first, *others = sources
    return tuple(other.name for other in others if _is_rescaled(first, other))


def _is_rescaled(first: Source, other: Source) -> bool:
    from flexquant.merge.kv.dequantize import WeightReader  # torch, which verifying does without

    readers = WeightReader(first), WeightReader(other)
    for module in _linears(first):
        try:
            rows = min(ROWS, readers[0].shape(module)[0])
            reference, weight = (reader.read(module, 0, rows).weight for reader in readers)
        except FlexQuantError:
            continue
        gains = (weight * reference).sum(1) / reference.square().sum(1).clamp_min(1e-12)
        if float((gains - 1).abs().median()) > BOUND:
            return True
    return False


def _linears(source: Source) -> list[str]:
    """Return the linears of the decoder layers, without routed experts, which have no adapters."""
    matrices = (name for name, ref in source.tensors.items() if len(ref.shape) == 2)
    inside = (name for name in matrices if decoder_layer(name) and not EXPERTS.match(name))
    linears = (name.removesuffix("_packed").rpartition(".") for name in inside)
    return [module for module, _, parameter in linears if parameter == "weight"]
