# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the products of a CPU and of a GPU share: the buffers that a layer needs beside INT4 weights.

Nested weights are computed like those of one copy, and then corrected by differences of 4 bits and by
exceptions. FORMAT.md has the arithmetic to the last rounding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexquant.checkpoint.nested import unpack_nibbles
from flexquant.serving.vllm_api import MPLinearKernel

CHANNEL_SCALE = "flexquant_scale"
"""Name of a buffer: the scales of a layer's 8-bit weights, float32 [outputs]."""
ROW, COLUMN = "flexquant_row", "flexquant_column"
"""Names of buffers: what is multiplied by the INT4 weights of each output and each input, float32."""
WEIGHT_SUMS = "flexquant_weight_sums"
"""Name of a buffer: the sum of each output's 8-bit weights, int32, which zero points of inputs take."""
DIFFERENCE = "flexquant_difference"
"""Name of a buffer: what is added, in 4 bits, packed as the INT4 kernel packs its weights; 8 stands for 0."""
PLACES, EXCEPTIONS = "flexquant_exception_input", "flexquant_exception"
"""Names of buffers [outputs, exceptions]: inputs, int32 (-1: none), and the weights there, int8."""
NESTED = (COLUMN, DIFFERENCE, PLACES, EXCEPTIONS)
"""The buffers of nested weights, in the order in which operators take them."""

Buffers = Mapping[str, Any]

_library = torch.library.Library("flexquant", "FRAGMENT")


class Product(ABC):
    """Multiplies in 8 bit by weights that are computed from those that ``kernel`` keeps in INT4."""

    precision = "INT8"

    def __init__(self, kernel: MPLinearKernel) -> None:
        self._kernel = kernel
        self._inputs, self._outputs = kernel.config.partition_weight_shape

    @property
    def written_bytes(self) -> int:
        """The bytes to which a layer's weights are written."""
        return self._inputs * self._outputs

    def prepare(
        self, source: nn.Module, nested: Mapping[str, Tensor] | None = None, symmetric: bool = True
    ) -> dict[str, Tensor]:
        """Return the buffers that :meth:`multiply` needs beside ``source``, once its weights are packed.

        ``nested`` are CHANNEL_SCALE, ROW and NESTED, the difference as stored: uint8 [outputs, inputs / 2].
        None: the weights are those nearest to the source's. ``symmetric``: activations have no zero points.
        """
        if nested is None:
            scales = self._channel_scales(source)
            return {CHANNEL_SCALE: scales, ROW: scales.reciprocal()}
        buffers = {**nested, DIFFERENCE: self._packed(unpack_nibbles(nested[DIFFERENCE]))}
        if not symmetric:
            buffers[WEIGHT_SUMS] = self._weight_sums(source, buffers)
        return buffers

    @abstractmethod
    def multiply(self, source: nn.Module, buffers: Buffers, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype."""

    @abstractmethod
    def _channel_scales(self, source: nn.Module) -> Tensor:
        """Return the scales of 8-bit weights, float32 [outputs], by each channel's greatest weight."""

    @abstractmethod
    def _packed(self, difference: Tensor) -> Tensor:
        """Return 4-bit values [outputs, inputs], packed as the kernel packs its weights."""

    @abstractmethod
    def _weight_sums(self, source: nn.Module, buffers: Buffers) -> Tensor:
        """Return the sum of each output's nested INT8 weights, int32 [outputs]."""


def register_operator(function: Callable[..., Tensor], device: str, output: Callable[..., Tensor]) -> None:
    """Make ``function`` an operator of torch for a device; ``output`` returns an output without values."""
    name = function.__name__
    _library.define(name + torch.library.infer_schema(function, mutates_args=()))
    _library.impl(name, function, device)
    torch.library.register_fake(f"flexquant::{name}", output, lib=_library)


def output_of_int4(x: Tensor, packed: object, scale: Tensor, *_: object) -> Tensor:
    return x.new_empty((x.shape[0], scale.shape[1]))
