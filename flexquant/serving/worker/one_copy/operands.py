# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a linear's INT8 weights are computed with, beside the INT4 weights in which they are nested.

Each pass computes them as those of one copy, and corrects them by differences of 4 bits and by exceptions;
FORMAT.md has the arithmetic to the last rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHANNEL_SCALE = "flexquant_channel_scale"
"""Name of a buffer of a layer: the scales of its 8-bit weights, float32 [outputs]."""
ROW, COLUMN = "flexquant_row", "flexquant_column"
"""Names of buffers: what is multiplied by the INT4 weights of each output and each input, float32."""
WEIGHT_SUMS = "flexquant_weight_sums"
"""Name of a buffer: the sum of each output's 8-bit weights, int32, which zero points of inputs take."""
DIFFERENCE = "flexquant_difference"
"""Name of a buffer: what is added, in 4 bits, packed as the INT4 kernel packs its weights."""
PLACES, EXCEPTIONS = "flexquant_places", "flexquant_exceptions"
"""Names of buffers: the inputs of exceptions, int32 (-1: none), and the exceptions, int8."""


class NestedWeights(NamedTuple):
    """A rank's part of what a linear's INT8 weights are computed with; a merged checkpoint stores it."""

    channel_scale: torch.Tensor
    """Scales of the INT8 weights, float32 [outputs]."""
    row: torch.Tensor
    """float32 [outputs]."""
    column: torch.Tensor
    """float32 [inputs]."""
    difference: torch.Tensor
    """uint8 [outputs, inputs / 2], of neighbouring inputs, the first in the low bits; 8 stands for 0."""
    exception_input: torch.Tensor
    """Inputs of the weights that take the place of computed ones, int32 [outputs, exceptions]; -1: none."""
    exception: torch.Tensor
    """These weights, int8 [outputs, exceptions]."""

    def factors(self) -> dict[str, torch.Tensor]:
        return {CHANNEL_SCALE: self.channel_scale, ROW: self.row, COLUMN: self.column}
