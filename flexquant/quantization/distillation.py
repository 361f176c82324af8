# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make a variant lose less against the 16-bit model, by training its scales.

GPTQ minimises the output error of every linear by itself. Training changes no integer, but all scales
together, to minimise the KL divergence of the next token to the 16-bit model's on the calibration rows, as in
the second stage of EfficientQAT (arXiv 2407.11062). Bytes and kernels do not change.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_range
from compressed_tensors.utils import patch_attr
from llmcompressor.utils.dev import get_main_device
from torch.nn import functional
from transformers import PreTrainedModel

from flexquant.checkpoint.writer import Progress
from flexquant.errors import FlexQuantError
from flexquant.quantization.resolve import LM_HEAD

BATCH = 4
"""Rows in a step."""
LEARNING_RATE = 1e-3
"""Highest learning rate of the factors by which the scales change."""
WARM_UP = 4
"""Steps until the highest learning rate, from which the rate falls as a cosine."""


def distill_scales(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    rows: Sequence[torch.Tensor],
    epochs: int,
    seed: int,
    progress: Progress | None,
) -> list[float]:
    """Train the scales of ``model`` in place; return the mean KL divergence of every epoch, nats a token.

    ``model`` has weight-only integer quantisation, and is not saved yet; ``teacher`` is the 16-bit model. All
    ``rows`` [tokens] have one length. ``progress`` is called with (steps done, all steps). Raises
    FlexQuantError if the divergence is not finite.
    """
    quantised = {name: m for name, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    linears: list[Any] = [module for name, module in quantised.items() if name != LM_HEAD]
    device = get_main_device()
    teacher.to(device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    factors = [torch.ones_like(module.weight_scale, dtype=torch.float32) for module in linears]
    integers = [*map(_integers, linears)]
    optimizer = torch.optim.Adam([f.requires_grad_() for f in factors], lr=LEARNING_RATE, betas=(0.9, 0.95))
    steps = epochs * math.ceil(len(rows) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_rate, steps=steps))
    random = torch.Generator().manual_seed(seed)
    found: list[float] = []
    with ExitStack() as stack, torch.enable_grad():
        for module, number, factor in zip(linears, integers, factors, strict=True):
            held = {"integers": number, "scale": module.weight_scale.float(), "bias": module.bias}
            forward = functools.partial(_forward, factor=factor, **held)
            stack.enter_context(patch_attr(module, "forward", forward))
        for _ in range(epochs):
            divergences = []
            for batch in torch.randperm(len(rows), generator=random).split(BATCH):
                divergence = _divergence(model, teacher, torch.stack([rows[i] for i in batch]).to(device))
                divergence.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                divergences.append(float(divergence.detach()))
                if not math.isfinite(divergences[-1]):
                    problem = "the KL divergence to the 16-bit model is not finite on the calibration data"
                    advice = "check that the model answers sensibly, or remove scale_distillation"
                    raise FlexQuantError(f"{problem}; {advice} from the recipe")
                if progress is not None:
                    progress(schedule.last_epoch, steps)
            found.append(sum(divergences) / len(divergences))
    for module, number, factor in zip(linears, integers, factors, strict=True):
        scale = module.weight_scale.float() * factor.detach()
        update_offload_parameter(module, "weight_scale", scale)
        update_offload_parameter(module, "weight", (number * scale[..., None]).flatten(1))
    return found


@torch.no_grad()
def _integers(module: Any) -> torch.Tensor:
    """Return a quantised linear's integers less zero points [out, groups, inputs of a group]."""
    args: QuantizationArgs = module.quantization_scheme.weights
    scale = module.weight_scale.float()
    lowest, highest = calculate_range(args, scale.device)
    if not args.symmetric:
        zero_point = module.weight_zero_point[..., None].int()
        lowest, highest = lowest - zero_point, highest - zero_point
    grouped = module.weight.float().view(len(scale), scale.shape[1], -1)
    found = (grouped / scale[..., None]).round().clamp(lowest, highest)
    return found.to(torch.int8 if args.symmetric or args.num_bits < 8 else torch.int16)


def _forward(
    x: torch.Tensor, *, integers: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, bias: Any
) -> torch.Tensor:
    return functional.linear(x, (integers * (scale * factor)[..., None]).flatten(1).to(x.dtype), bias)


def _divergence(model: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean KL divergence over the tokens of ``ids`` [rows, tokens], in float32."""
    # The processor multiplies in bfloat16 if it can, which halves the time of training.
    in_16_bit = ids.device.type != "cpu" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=in_16_bit):
        with torch.no_grad():
            expected = teacher(input_ids=ids, use_cache=False).logits
        given = model(input_ids=ids, use_cache=False).logits
    target = expected.float().log_softmax(-1).flatten(0, 1)
    found = given.float().log_softmax(-1).flatten(0, 1)
    return functional.kl_div(found, target, reduction="batchmean", log_target=True)


def _rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, as a share of the highest."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
