# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How much memory the weights of each variant take, and what the model would take in 16 bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    for tensor, names in owners.items():
        sizes["shared" if len(names) > 1 else names[0]] += tensor.nbytes
    return sizes


def bytes_in_16_bit(variant: nn.Module) -> int:
    """Return the bytes of one copy of the model with two bytes a parameter, on this rank."""
    counted: set[torch.Tensor] = set()
    elements = 0
    for module in variant.modules():
        own = [p for _, p in module.named_parameters(recurse=False)]
        if isinstance(module, LinearBase):
            linear: Any = module
            elements += linear.input_size_per_partition * linear.output_size_per_partition
            own = [linear.bias] if getattr(linear, "bias", None) is not None else []
        elements += sum(p.numel() for p in own if p not in counted)
        counted.update(own)
    return 2 * elements
