# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How much memory the weights of each variant take, and what the model would take in 16 bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase


def weight_bytes(variants: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the bytes of parameters by variant, and under ``shared`` those that several variants hold.

    As loaded, on this rank: a kernel may repack a weight afterwards, in place of the loaded one.
    """
    owners: dict[torch.Tensor, list[str]] = {}
    for name, variant in variants.items():
        for parameter in variant.parameters():
            owners.setdefault(parameter, []).append(name)
    sizes = dict.fromkeys([*variants, "shared"], 0)
    for parameter, names in owners.items():
        sizes["shared" if len(names) > 1 else names[0]] += parameter.nbytes
    return sizes


def bytes_in_16_bit(variant: nn.Module) -> int:
    """Return the bytes of one copy of the model with two bytes a parameter, on this rank."""
    tied: set[torch.Tensor] = set()
    parameters = 0
    for module in variant.modules():
        if isinstance(module, LinearBase):
            parameters += module.input_size_per_partition * module.output_size_per_partition
            own = [module.bias] if getattr(module, "bias", None) is not None else []
        else:
            own = list(module.parameters(recurse=False))
        for parameter in own:
            if parameter not in tied:
                tied.add(parameter)
                parameters += parameter.numel()
    return 2 * parameters
