# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How INT4 kernels for CPUs keep a layer's weights: vLLM's, and PyTorch's, found out on a small weight."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flexquant.serving.kernels.cpu_int4 import INNER_K_TILES, TorchCPUInt4LinearKernel
from flexquant.serving.kernels.cpu_kernels import AMXW4A8LinearKernel
from flexquant.serving.vllm_api import CPUWNA16LinearKernel, ZentorchWNA16LinearKernel


@dataclass(frozen=True)
class Layout:
    """How an INT4 kernel keeps a layer's weights: in blocks of outputs, each [inputs, block] of 4 bits."""

    block: int
    """Outputs of a block; the last one can be narrower, and then holds neighbours."""
    in_halves: bool
    """Whether a byte holds outputs b and b + block / 2, and not neighbours."""


def layout_of(kind: type) -> Layout | None:
    """Return the layout in which a kind of kernel keeps weights; None if it is not known, as zentorch's."""
    if issubclass(kind, TorchCPUInt4LinearKernel):
        return pytorch_layout()
    others = AMXW4A8LinearKernel, ZentorchWNA16LinearKernel
    is_vllms = issubclass(kind, CPUWNA16LinearKernel) and not issubclass(kind, others)
    return Layout(16, in_halves=False) if is_vllms else None


@functools.cache
def pytorch_layout() -> Layout | None:
    """Return the layout of PyTorch's operator on this CPU, found out on a small weight."""
    inputs, outputs = 32, 64 + 16
    with torch.device("cpu"):  # a model may be under construction without memory
        values = torch.randint(0, 16, (outputs, inputs), generator=torch.Generator().manual_seed(0)).int()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, INNER_K_TILES)
        for layout in (Layout(b, h) for b in (64, 32) for h in (True, False)):
            if torch.equal(unpacked(packed, layout, inputs, outputs).int().t(), values):
                return layout
    return None


def unpacked(packed: Tensor, layout: Layout, inputs: int, outputs: int) -> Tensor:
    """Return the 4-bit values, uint8 [inputs, outputs], of a kernel's ``packed`` weights."""
    flat, parts, whole = packed.flatten().view(torch.uint8), [], outputs // layout.block * layout.block
    for first, last, width in ((0, whole, layout.block), (whole, outputs, outputs - whole)):
        if first < last:
            pairs = flat[first * inputs // 2 : last * inputs // 2].view(-1, inputs, width // 2)
            beside = 2 if layout.in_halves and width == layout.block else 3
            values = torch.stack([pairs & 15, pairs >> 4], beside).flatten(2)
            parts.append(values.transpose(0, 1).reshape(inputs, -1))
    return torch.cat(parts, 1)


def packed_alike(values: Tensor, layout: Layout) -> Tensor:
    """Return 4-bit ``values``, uint8 [inputs, outputs], packed in a layout: uint8, flat."""
    blocks = []
    for first in range(0, values.shape[1], layout.block):
        block = values[:, first : first + layout.block]
        in_halves = layout.in_halves and block.shape[1] == layout.block
        low, high = block.chunk(2, 1) if in_halves else (block[:, ::2], block[:, 1::2])
        blocks.append((low | high << 4).flatten())
    return torch.cat(blocks)
