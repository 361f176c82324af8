# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Multiply in 8 bit on a GPU by weights that are computed from INT4 weights.

``gpu_kernel`` writes a layer's 8-bit weights into memory that all layers share, and vLLM's CUTLASS product
follows. The weights are read as vLLM's INT4 kernels keep them: Marlin, and Humming, which took Marlin's
layout. Both have tiles of 16 inputs and 64 outputs, in which each of 128 words holds eight values that one
thread multiplies (``get_weight_perm`` in vLLM's ``marlin_utils_test.py``, ``weight_repack_nk`` in Humming's
``process.cuh``). What differs is in :class:`Layout`; which one holds is tried on a small weight.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.platforms import current_platform

from flexquant.serving.kernels.layers import kernel_of_layer
from flexquant.serving.kernels.trial import Layer, new_layer, ready
from flexquant.serving.vllm_api import (
    HummingLinearKernel,
    MarlinLinearKernel,
    MPLinearKernel,
    MPLinearLayerConfig,
    get_scale_perms,
    unpack_cols,
    unpack_quantized_values_into_int32,
)
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker.one_copy.gpu_kernel import INT8, eight_bit_weights
from flexquant.serving.worker.one_copy.product import (
    CHANNEL_SCALE,
    NESTED,
    ROW,
    WEIGHT_SUMS,
    Buffers,
    Product,
    output_of_int4,
    register_operator,
)

ZERO, BIAS = "flexquant_zero", "flexquant_bias"
"""Names of further buffers of a layer: int8 [groups, outputs] and [outputs], in their order."""
FP8 = torch.float8_e4m3fn
GREATEST = {INT8: 127.0, FP8: 448.0}
"""Greatest weight of each precision."""
BLACKWELL = 100
"""Compute capability from which on vLLM's CUTLASS product has no INT8; FP8 takes its place."""

_memory: dict[torch.device, Tensor] = {}

logger = init_logger("vllm.flexquant.kernels")


@dataclass(frozen=True)
class Layout:
    """How an INT4 kernel keeps a layer's weights, packed int32 [inputs / 16, outputs * 2]."""

    names: tuple[str, str, str] | None
    """Names of a layer's weights, scales and zero points; None: those that the kernel has for them."""
    outputs_first: bool
    """Whether a word's places 0 and 1 are inputs i and i + 8 of one output; else outputs o and o + 8."""
    zeros: tuple[int, ...]
    """The output of each of eight zero points of a word."""
    multiples: tuple[tuple[int, int], ...]
    """Outputs and inputs of which the kernel takes multiples; it pads weights with others."""

    def tensors(self, kernel: MPLinearKernel, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the packed weights, the scales [groups, outputs] as kept, and zero points in their order."""
        packed, scale, zero, *_ = (
            kernel._get_weight_params(layer)
            if self.names is None
            else (getattr(layer, name, None) for name in self.names)
        )
        assert packed is not None and scale is not None
        if not kernel.config.zero_points or zero is None:
            return packed, scale, None
        groups, outputs = scale.shape
        return packed, scale, zeros_in_order_of_outputs(zero, groups, outputs, self.zeros)


INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
MARLIN = Layout(None, True, INTERLEAVED, ((64, 128), (128, 64)))
HUMMING = tuple(
    Layout(("weight", "weight_scale", "zero_point"), outputs_first, tuple(range(8)), ((256, 128),))
    for outputs_first in (True, False)
)
"""Humming's layouts: before 0.1.17 for Hopper's own instructions the second one, else the first."""
LAYOUTS: dict[type, tuple[Layout, ...]] = {MarlinLinearKernel: (MARLIN,), HummingLinearKernel: HUMMING}


def layout_of(kind: type[MPLinearKernel], config: MPLinearLayerConfig) -> Layout | None:
    """Return how a kind of kernel keeps a layer's weights, without padding; None if it is not known."""
    inputs, outputs = config.partition_weight_shape
    dtype = str(config.act_type).removeprefix("torch.")
    known = kind in LAYOUTS and not (128 % config.group_size and config.group_size % 128)
    layout = layout_found(kind, config.group_size, config.zero_points, dtype) if known else None
    fits = layout and any(outputs % n == 0 and inputs % k == 0 for n, k in layout.multiples)
    return layout if fits else None


@functools.cache
def layout_found(kind: type[MPLinearKernel], group: int, zero_points: bool, dtype: str) -> Layout | None:
    """Return the layout that reads back a small layer's random weights, and their scales and zero points."""
    inputs, outputs = max(256, group), 256
    layer = Layer(inputs=inputs, outputs=outputs, dtype=dtype, group_size=group, zero_points=zero_points)
    with torch.device("cuda"):  # a model may be under construction without memory
        linear = new_layer(layer, kind)
        kernel = kernel_of_layer(linear)
        assert isinstance(kernel, MPLinearKernel)
        packed, scale, zero, *_ = kernel._get_weight_params(linear)
        scales, int4 = scale.data.clone(), kernel.config.weight_type
        codes = unpack_quantized_values_into_int32(packed.data, int4, 1).view(outputs, scales.shape[1], -1)
        middle = torch.tensor(8) if zero is None else unpack_quantized_values_into_int32(zero.data, int4, 0)
        codes = (codes - middle[..., None]).flatten(1)
        try:
            ready(linear)
        except Exception as e:  # compiling a kernel fails in many ways
            logger.warning("FlexQuant cannot read the weights of %s, which does not run here: %s", kind, e)
            return None
        for layout in LAYOUTS[kind]:
            packed, kept, zero = layout.tensors(kernel, linear)
            ones = torch.ones_like(kept, dtype=torch.float32)
            out = torch.empty(outputs, inputs, dtype=torch.int8)
            found = eight_bit_weights(packed, ones, zero, ones[0], out, layout.outputs_first)
            if torch.equal(found.int(), codes) and torch.equal(in_order_of_outputs(kept).t(), scales):
                return layout
    return None


def packed_alike(values: Tensor, layout: Layout) -> Tensor:
    """Return 4-bit ``values`` [outputs, inputs], packed in a layout: int32 [inputs / 16, outputs * 2].

    A word has two neighbouring inputs of each half of a tile's 16 inputs, and of a block's 16 outputs.
    """
    outputs, inputs = values.shape
    # [column, block, half of its outputs, output % 8; tile, half of its inputs, pair % 4, odd]
    parts = values.int().view(outputs // 64, 4, 2, 8, inputs // 16, 2, 4, 2)
    halves = (2, 5) if layout.outputs_first else (5, 2)
    parts = parts.permute(4, 0, 3, 6, 1, 7, *halves).flatten(-3)
    shifts = 4 * torch.arange(8, device=values.device)
    return (parts.long() << shifts).sum(-1).to(torch.int32).view(inputs // 16, outputs * 2)


def in_order_of_outputs(scale: Tensor) -> Tensor:
    """Return a layer's scales [groups, outputs], as Marlin and Humming keep them, in the order of outputs."""
    grouped, single = get_scale_perms()
    return permuted_back(scale, grouped if len(scale) > 1 else single)


def zeros_in_order_of_outputs(zero: Tensor, groups: int, outputs: int, order: Sequence[int]) -> Tensor:
    """Return packed zero points, of which a word holds eight in an ``order``, as int8 [groups, outputs]."""
    values = permuted_back(unpack_cols(zero, 4, groups, outputs), order)
    return permuted_back(values, get_scale_perms()[0]).to(torch.int8)


def permuted_back(values: Tensor, order: Sequence[int]) -> Tensor:
    """Return ``values`` [.., outputs] as before each ``len(order)`` outputs were permuted so."""
    back = torch.tensor(order, device=values.device).argsort()
    return values.unflatten(-1, (-1, len(order)))[..., back].flatten(-2)


def channel_scales(
    packed: Tensor, scale: Tensor, zero: Tensor | None, precision: torch.dtype, outputs_first: bool
) -> Tensor:
    """Return the scales of 8-bit weights, float32 [outputs], by each channel's greatest weight."""
    groups, outputs = scale.shape
    inputs = packed.numel() * 8 // outputs
    ones = torch.ones_like(scale, dtype=torch.float32)
    out = scratch(packed.device, inputs * outputs, INT8).view(outputs, inputs)
    values = eight_bit_weights(packed, ones, zero, ones[0], out, outputs_first)  # value - zero, exactly
    most = values.view(outputs, groups, -1).abs().amax(2).float()
    greatest = (most * in_order_of_outputs(scale).float().abs().t()).amax(1)
    return torch.where(greatest > 0, greatest / GREATEST[precision], 1.0)


class GPUProduct(Product):
    """The product of a GPU, in INT8 or FP8."""

    def __init__(self, kernel: MPLinearKernel, layout: Layout, precision: str) -> None:
        super().__init__(kernel)
        self._layout = layout
        self._precision = eight_bit_type(precision)
        self.precision = "FP8" if self._precision == FP8 else "INT8"

    def prepare(
        self, source: nn.Module, nested: Mapping[str, Tensor] | None = None, symmetric: bool = True
    ) -> dict[str, Tensor]:
        packed, _, zero = self._weights(source)
        scratch(packed.device, self._inputs * self._outputs, self._precision)  # which is not made in a pass
        buffers = super().prepare(source, nested, symmetric)
        if zero is not None:
            buffers[ZERO] = zero
        if nested is None and (bias := getattr(source, "bias", None)) is not None:
            buffers[BIAS] = permuted_back(bias, get_scale_perms()[1])
        return buffers

    def multiply(self, source: nn.Module, buffers: Buffers, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, scale, _ = self._layout.names or (self._kernel.w_q_name, self._kernel.w_s_name, "")
        int4 = getattr(source, weight), getattr(source, scale), buffers.get(ZERO)
        nested = [buffers[name] for name in NESTED if name in buffers]
        factors = buffers[ROW], nested, buffers[CHANNEL_SCALE], buffers.get(WEIGHT_SUMS)
        bias = None if bias is None else buffers.get(BIAS, bias)
        kept = self._precision, self._layout.outputs_first
        out: Tensor = torch.ops.flexquant.one_copy_gpu_linear(x, *int4, *factors, bias, *kept)
        return out

    def _channel_scales(self, source: nn.Module) -> Tensor:
        return channel_scales(*self._weights(source), self._precision, self._layout.outputs_first)

    def _packed(self, difference: Tensor) -> Tensor:
        return packed_alike(difference, self._layout)

    def _weight_sums(self, source: nn.Module, buffers: Buffers) -> Tensor:
        packed, scale, zero = self._weights(source)
        memory = scratch(packed.device, self._inputs * self._outputs, INT8).view(self._outputs, self._inputs)
        nested = [buffers[name] for name in NESTED]
        outputs_first = self._layout.outputs_first
        weights = eight_bit_weights(packed, scale, zero, buffers[ROW], memory, outputs_first, nested)
        return weights.sum(1, dtype=torch.int32)

    def _weights(self, source: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._layout.tensors(self._kernel, source)


def one_copy_gpu_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    row: Tensor,
    nested: list[Tensor],
    channel_scale: Tensor,
    weight_sums: Tensor | None,
    bias: Tensor | None,
    precision: torch.dtype,
    outputs_first: bool,
) -> Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], quantised per token and multiplied in 8 bit."""
    outputs, inputs = scale.shape[1], x.shape[1]
    out = scratch(x.device, inputs * outputs, precision).view(outputs, inputs)
    weights = eight_bit_weights(packed, scale, zero, row, out, outputs_first, nested)
    return multiply_in_8_bit(x, weights, channel_scale, bias, weight_sums)


register_operator(one_copy_gpu_linear, "CUDA", output_of_int4)


def multiply_in_8_bit(
    x: Tensor, weights: Tensor, channel_scale: Tensor, bias: Tensor | None, weight_sums: Tensor | None = None
) -> Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype, which is quantised per token.

    ``weights`` int8 or float8_e4m3fn [outputs, inputs], ``channel_scale`` float32 [outputs]. With
    ``weight_sums``, int32 [outputs], each token has a zero point; not in FP8.
    """
    operand, of_weights = weights.t(), channel_scale[:, None]
    if weights.dtype == FP8:
        quantized, scales = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(quantized, operand, scales, of_weights, x.dtype, bias)
    quantized, scales, zero = ops.scaled_int8_quant(x.contiguous(), None, None, symmetric=weight_sums is None)
    operands = quantized, operand, scales, of_weights, x.dtype
    if weight_sums is None:
        return ops.cutlass_scaled_mm(*operands, bias)
    return ops.cutlass_scaled_mm_azp(*operands, weight_sums[None], zero, bias)


def eight_bit_type(precision: str) -> torch.dtype:
    """Return the type in which this GPU multiplies where a policy says int8 or fp8."""
    return FP8 if precision == "fp8" or current_platform.has_device_capability(BLACKWELL) else INT8


def scratch(device: torch.device, weights: int, precision: torch.dtype) -> Tensor:
    """Return memory for a layer's weights; it grows while layers are prepared, and never in a pass."""
    if device not in _memory or _memory[device].numel() < weights:
        _memory[device] = torch.empty(weights, dtype=INT8, device=device)
    return _memory[device][:weights].view(precision)
