# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Name vLLM's kernels for INT4 weights on NVIDIA GPUs, and run W4A8 by those that can.

A derived W4A8 variant has W4A16's tensors, and vLLM's kernels for it expect the config of a checkpoint that
was quantised to W4A8: the classes here translate. A W4A16 kernel cannot read their layouts.
"""

import dataclasses

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.serving.derivable import check_signs
from flexquant.serving.vllm_api import (
    CutlassW4A8LinearKernel,
    HummingLinearKernel,
    MarlinLinearKernel,
    MPLinearLayerConfig,
    scalar_types,
)

HUMMING_DTYPES = {torch.int8: "int8", torch.float8_e4m3fn: "float8e4m3"}


class MarlinW4A8LinearKernel(MarlinLinearKernel):
    """Marlin that refuses scales below zero where it does not multiply right with them.

    Delete when the oldest supported vLLM divides them by the greatest magnitude, not by the greatest
    (``marlin_act_int8_process_scales``), and its kernel reads them as signed numbers.
    """

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.act_type == torch.float8_e4m3fn and current_platform.is_device_capability(90):
            return False, "Marlin has no kernel for FP8 activations on Hopper"
        return super().can_implement(c)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        # A checkpoint that was published, not merged, does not record such scales.
        if bool((getattr(layer, self.w_s_name) < 0).any()):
            check_signs("int8" if self.config.act_type == torch.int8 else "fp8", "an INT4 layer")
        super().process_weights_after_loading(layer)


class HummingW4A8LinearKernel(HummingLinearKernel):
    """Humming with 8-bit activations: vLLM 0.26 takes them from the layer, later ones from the config."""

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.act_type not in HUMMING_DTYPES or c.zero_points:
            return False, "it takes 8-bit activations, and weights without zero points"
        return super().can_implement(c)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        dtype = HUMMING_DTYPES[self.config.act_type]
        vars(layer)["_humming_input_quant_config"] = {"quant_method": "humming", "dtype": dtype}
        super().process_weights_after_loading(layer)


class CutlassW4A8FP8LinearKernel(CutlassW4A8LinearKernel):
    """CUTLASS's W4A8 for Hopper: FP8 activations, groups of 128; it rounds scales of groups to FP8."""

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        return super().can_implement(_signed(c))

    def __init__(self, c: MPLinearLayerConfig, *names: str | None) -> None:
        super().__init__(_signed(c), *names)
        self.config = c  # so that another kernel can take the layer over


def _signed(c: MPLinearLayerConfig) -> MPLinearLayerConfig:
    """Return the config with the type that this kernel gives symmetric INT4, which is stored alike."""
    if c.weight_type != scalar_types.uint4b8:
        return c
    return dataclasses.replace(c, weight_type=scalar_types.int4)


W4A8_KERNELS = (CutlassW4A8FP8LinearKernel, HummingW4A8LinearKernel, MarlinW4A8LinearKernel)
"""Kernels for INT4 weights and 8-bit activations, the one to take without a trial first."""
