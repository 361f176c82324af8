# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply in INT8 on a CPU by weights that are computed from INT4 weights, in the layout of the INT4 kernel.

Each call goes over a layer's outputs in slices, whose INT8 weights it writes into memory that all layers of a
thread share. With AMX it writes them as vLLM's product for W8A8 keeps them, and calls that. Elsewhere it has
oneDNN multiply (``torch._int_mm``), and scales the sums. The loops around the products are int4_to_int8.cpp
(:mod:`flexquant.serving.kernels.cpu_loops`); without a compiler, PyTorch's operators do the same for all
outputs at once, but far more slowly.
"""

import functools
import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import flexquant.serving.worker.one_copy.product as product
from flexquant.serving.kernels.cpu_kernels import AMXW4A8LinearKernel, exact_int8_linear
from flexquant.serving.kernels.cpu_loops import has_loops, thread_memory
from flexquant.serving.kernels.cpu_weight_only import INNER_K_TILES, TorchCPUInt4LinearKernel
from flexquant.serving.vllm_api import (
    CPUWNA16LinearKernel,
    MPLinearKernel,
    ZentorchWNA16LinearKernel,
    scalar_types,
    unpack_quantized_values_into_int32,
)
from flexquant.serving.vllm_api import _custom_ops as ops

ZERO = 8.0
"""Value of a symmetric INT4 weight that stands for 0."""
WEIGHTS, SUMS = 1 << 22, 1 << 22
"""Most weights and sums of a slice, but for one of MULTIPLE outputs: bytes, and words of 4 bytes."""
AMX_WEIGHTS = 1 << 25
"""Most weights of a slice for AMX, whose outputs are copied if there are several slices."""
AMX_TYPES = (torch.bfloat16, torch.float16)
"""Types of activations that vLLM's product for AMX takes."""
MULTIPLE = 64
"""Outputs of which slices have multiples; blocks have parts of it."""

_weights, _sums = threading.local(), threading.local()


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


class CPUInt8Product(product.Product):
    def __init__(self, kernel: MPLinearKernel, layout: Layout) -> None:
        super().__init__(kernel)
        self._layout = layout
        group = kernel.config.group_size
        is_whole = not (self._outputs % MULTIPLE or self._inputs % 32 or (group > 0 and group % 32))
        self._for_amx = is_whole and has_amx_product()

    @property
    def written_bytes(self) -> int:
        slice_bytes = max(AMX_WEIGHTS if self._for_amx else WEIGHTS, self._inputs * MULTIPLE)
        return min(super().written_bytes, slice_bytes)

    def multiply(self, source: nn.Module, buffers: product.Buffers, x: Tensor, bias: Tensor | None) -> Tensor:
        nested = [buffers[name] for name in product.NESTED if name in buffers]
        weights = x, *self._weights(source), buffers[product.ROW], nested, buffers[product.CHANNEL_SCALE]
        sums, kept = buffers.get(product.WEIGHT_SUMS), (bias, self._layout.block, self._layout.in_halves)
        out: Tensor = (
            torch.ops.flexquant_one_copy.linear_by_amx(*weights, *kept, AMX_WEIGHTS)
            if self._for_amx and x.dtype in AMX_TYPES and sums is None  # it has no zero points
            else torch.ops.flexquant.one_copy_linear(*weights, sums, *kept)
        )
        return out

    def _channel_scales(self, source: nn.Module) -> Tensor:
        return channel_scales(*self._weights(source), self._inputs, self._layout)

    def _packed(self, difference: Tensor) -> Tensor:
        return packed_alike(difference.t(), self._layout)

    def _weight_sums(self, source: nn.Module, buffers: product.Buffers) -> Tensor:
        packed, scale, zero = self._weights(source)
        scale, zero = scale.float().contiguous(), None if zero is None else zero.contiguous()
        given = scale, zero, buffers[product.ROW], [buffers[name] for name in product.NESTED]
        parts = slices(1, self._inputs, self._outputs)
        weights = (_int8_weights(packed, *given, self._inputs, self._layout, part) for part in parts)
        return torch.cat([of_slice.sum(0, dtype=torch.int32) for of_slice in weights])

    def _weights(self, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return packed weights, scales [groups, outputs], and zero points, int32 in packs of 8, if any."""
        packed, scale, zero, *_ = self._kernel._get_weight_params(layer)
        scale = scale.data[..., 0] if isinstance(self._kernel, TorchCPUInt4LinearKernel) else scale.data
        return packed, scale, zero.data if self._kernel.config.zero_points and zero is not None else None


def channel_scales(packed: Tensor, scale: Tensor, zero: Tensor | None, inputs: int, layout: Layout) -> Tensor:
    """Return the scales of INT8 weights, float32 [outputs], by which each channel's greatest becomes 127."""
    groups, outputs = scale.shape
    ones = torch.ones(groups, outputs, dtype=torch.float32)
    greatest = torch.empty(outputs, dtype=torch.float32)
    for part in slices(1, inputs, outputs):
        exact = _int8_weights(packed, ones, zero, ones[0], [], inputs, layout, part)  # value - zero
        most = exact.view(groups, -1, len(part)).float().abs().amax(1)
        here = slice(part.start, part.stop)
        greatest[here] = (most * scale[:, here].float().abs()).amax(0)
    return torch.where(greatest > 0, greatest / 127, 1.0)


def slices(tokens: int, inputs: int, outputs: int) -> list[range]:
    """Return the parts of a layer's outputs that are computed one after another."""
    if not has_loops():
        return [range(outputs)]
    most = min(WEIGHTS // inputs, SUMS // max(1, tokens))
    step = max(MULTIPLE, most // MULTIPLE * MULTIPLE)
    return [range(first, min(first + step, outputs)) for first in range(0, outputs, step)]


def one_copy_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    row: Tensor,
    nested: list[Tensor],
    channel_scale: Tensor,
    weight_sums: Tensor | None,
    bias: Tensor | None,
    block: int,
    in_halves: bool,
) -> Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs] in its dtype, multiplied in INT8.

    ``x`` is quantised per token, with a zero point if there are ``weight_sums``. The INT4 weights become INT8
    weights with scales ``channel_scale``, by ``row`` and ``nested``: the tensors of NESTED, if any.
    """
    layout, bias = Layout(block, in_halves), None if bias is None else bias.float()
    scale, zero = scale.float().contiguous(), None if zero is None else zero.contiguous()
    is_symmetric = weight_sums is None
    quantized, of_token, middle = ops.onednn_scaled_int8_quant(x.contiguous(), None, None, is_symmetric)
    (tokens, inputs), outputs = x.shape, scale.shape[1]
    out = torch.empty(tokens, outputs, dtype=x.dtype)
    for part in slices(tokens, inputs, outputs):
        here = slice(part.start, part.stop)
        weights = _int8_weights(packed, scale, zero, row, nested, inputs, layout, part)
        zeros = None if middle is None or weight_sums is None else (middle, weight_sums[here])
        of_outputs = channel_scale[here], None if bias is None else bias[here]
        if has_loops() and int8_product_is_exact():
            sums = thread_memory(_sums, tokens * len(part), torch.int32)
            sums = sums[: tokens * len(part)].view(tokens, len(part))
            torch._int_mm(quantized, weights, out=sums)
            scale_sums = torch.ops.flexquant_one_copy.scale_sums
            scale_sums(sums, of_token, *(zeros or (None, None)), *of_outputs, out[:, here])
        else:
            out[:, here] = _scaled_product(quantized, weights, of_token, zeros, *of_outputs)
    return out


product.register_operator(one_copy_linear, "CPU", product.output_of_int4)


def _scaled_product(
    x: Tensor,
    weights: Tensor,
    row: Tensor,
    zeros: tuple[Tensor, Tensor] | None,
    channel_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return [tokens, outputs], float32, by PyTorch's operators.

    ``zeros`` are the tokens' zero points, int32 [tokens, 1], and the weights' sums, int32 [outputs].
    """
    if int8_product_is_exact():
        sums = torch._int_mm(x, weights)
        exact = sums if zeros is None else sums.sub_(zeros[0] * zeros[1])
        scaled = exact.float().mul_(row).mul_(channel_scale)
    else:
        around_zero = x if zeros is None else x.int() - zeros[0]
        scaled = exact_int8_linear(around_zero, row, weights.t(), channel_scale)
    return scaled if bias is None else scaled.add_(bias)


@functools.cache
def has_amx_product() -> bool:
    """Whether vLLM has its INT8 product for AMX here, with weights as ``int4_to_amx`` writes them."""
    if not (hasattr(torch.ops._C, "int8_scaled_mm_with_quant") and torch.cpu._is_amx_tile_supported()):
        return False
    with torch.device("cpu"):  # a model may be under construction without memory
        weight = torch.arange(64 * 32).remainder(251).sub(125).to(torch.int8).view(64, 32)
        in_fours = weight.view(2, 32, 8, 4).transpose(1, 2).reshape(2, -1)
        sums = (128 * weight.sum(1, dtype=torch.int32)).view(torch.int8).view(2, -1)
        expected = torch.cat([in_fours, sums], 1).view(64, 36)
        is_as_expected = torch.equal(torch.ops._C.convert_weight_packed(weight), expected)
    if not (is_as_expected and has_loops() and hasattr(torch.ops.flexquant_one_copy, "linear_by_amx")):
        return False  # the operator is missing if the compiler does not know AMX
    torch.library.register_fake("flexquant_one_copy::linear_by_amx", product.output_of_int4)
    return True


@functools.cache
def int8_product_is_exact() -> bool:
    """Whether PyTorch's INT8 product has the right sums on this CPU, tried with the largest values."""
    x, weights = (torch.full(shape, 127, dtype=torch.int8) for shape in ((16, 64), (64, 16)))
    return bool((torch._int_mm(x, weights) == 64 * 127 * 127).all())


def _zeros(zero: Tensor | None, scale: Tensor) -> Tensor:
    """Return the values that stand for 0, float32 [groups, outputs]."""
    if zero is None:
        return torch.full(scale.shape, ZERO, dtype=torch.float32)
    return unpack_quantized_values_into_int32(zero, scalar_types.uint4, packed_dim=1).float().contiguous()


def _int8_weights(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    row: Tensor,
    nested: list[Tensor],
    inputs: int,
    layout: Layout,
    part: range,
) -> Tensor:
    """Return (value - zero) * (scale * row), or nested weights, as int4_to_int8.cpp describes them.

    They are a slice's, int8 [inputs, some outputs]; the thread's next call writes over them.
    """
    (groups, outputs), some = scale.shape, len(part)
    out = thread_memory(_weights, inputs * some, torch.int8)[: inputs * some].view(inputs, some)
    if has_loops():
        torch.ops.flexquant_one_copy.int4_to_int8(
            packed, scale, zero, row, nested, layout.block, layout.in_halves, part.start, out
        )
        return out
    ratio, zeros = scale * row, _zeros(zero, scale)
    values = unpacked(packed, layout, inputs, outputs).view(groups, -1, outputs)
    scaled = values.float().sub_(zeros[:, None]).mul_(ratio[:, None]).view(inputs, outputs)
    if not nested:
        return out.copy_(scaled.round_())
    column, difference, places, exceptions = nested
    near = scaled.mul_(column[:, None]).round_()
    out.copy_(near.add_(unpacked(difference, layout, inputs, outputs)).sub_(ZERO))
    of_output, which = (places >= 0).nonzero(as_tuple=True)
    return out.index_put_((places[of_output, which].long(), of_output), exceptions[of_output, which])
