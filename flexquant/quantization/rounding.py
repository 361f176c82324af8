# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Round to nearest with compressed-tensors' own arithmetic, to measure what a scheme does to a linear."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from llmcompressor.observers import Observer


def round_weight(weight: torch.Tensor, args: QuantizationArgs | None) -> torch.Tensor:
    """Quantise and dequantise a weight [out, in], in its dtype; ``args`` None leaves it unchanged."""
    if args is None:
        return weight
    observer = Observer.load_from_registry(
        "memoryless_minmax", base_name="weight", args=args.model_copy(update={"observer_kwargs": {}})
    )
    found = observer(weight).get_qparams()
    return fake_quantize(weight, found["scale"], found["zero_point"], args, found["global_scale"])


def round_input(x: torch.Tensor, args: QuantizationArgs | None) -> torch.Tensor:
    """Quantise and dequantise activations [batch, tokens, in]; ``args`` None leaves them unchanged.

    Static schemes, too, use the scale of the given activations.
    """
    if args is None:
        return x
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    return fake_quantize(x, scale, zero_point, args)
