# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Predict the time of a linear, of a forward pass, and of equal requests that arrive at once.

A linear with N outputs and K inputs takes for M tokens

    time = call + ((bytes / bandwidth) ^ p + (operations / rate) ^ p) ^ (1 / p)

*bytes* are the stored weight with its scales, the activations and the 16-bit outputs. *operations* are
2 M N K, except for kernels with tiles: these cover M x N with whole tiles, in whole waves over the processors
("tile and wave quantization", NVIDIA's Matrix Multiplication Background User's Guide). *p* is a device file's
``overlap``: with 1 the parts are added; kernels measured on an H200 overlap them (2). Rates and bandwidths
are the data sheets'. W8A8 is taken as FP8 on all GPUs that have FP8.

On Hopper the kernels' fractions of them are fitted to this repository's runs on an H200 and an H100: the
ratios of W4A16, W4A8 and one copy to W8A8 are within 15 % of those measured. Elsewhere W8A8 is assumed to
reach 0.6 of the rate and 0.9 of the bandwidth, and W4A16 is calibrated on published gains and losses of
Marlin (N = K = 8192), whose crossovers it predicts within the published brackets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from statistics import fmean
from typing import NamedTuple, Self

from flexquant.planning.device import GIB, HUMMING, W4A8, W4A8_INT8, Device, Kernel
from flexquant.planning.planned_model import Linear, ModelShape
from flexquant.policy.schema import Phase

QUANTISED_ACTIVATIONS = ("w8a8", "fp8", W4A8, W4A8_INT8)


@dataclass(frozen=True)
class Batch:
    """What one forward pass computes."""

    tokens: int
    sequences: int
    """Sequences; lm_head computes one row for each."""
    cached: float = 0
    """Tokens that decoding sequences read from the KV cache."""
    pairs: float = 0.0
    """Pairs of a query and a key in the attention to prompts."""


def pass_seconds(model: ModelShape, variant: str, batch: Batch, device: Device) -> float:
    """Return the seconds of a forward pass in one variant on one device; communication is left out."""
    seconds = linear_seconds(model.head, batch.sequences, device, in_pass=True)
    for linear, count in model.linears[variant].items():
        between = 2 * batch.tokens * linear.active_experts * (linear.inputs + linear.outputs)
        call = linear_seconds(linear, batch.tokens, device, in_pass=True)
        call += preparation_seconds(linear, batch.tokens, device)
        seconds += count * (call + between / device.between_bytes_per_s)
    moved = batch.cached * model.kv_bytes_per_token + 2 * batch.sequences * model.state_bytes
    seconds += moved / device.kernel("bf16").bytes_per_s
    seconds += batch.pairs * model.attention_flops / device.attention_flops_per_s
    return seconds + device.pass_seconds + model.num_layers * device.layer_seconds


def scheme_on(device: Device, linear: Linear, scheme: str) -> str:
    """Return a linear's ``scheme``, or FP8 for weights computed in each pass on a device without INT8."""
    return "fp8" if linear.source_bytes and scheme not in device.kernels else scheme


def linear_seconds(linear: Linear, tokens: int, device: Device, in_pass: bool = False) -> float:
    """Return the time of one call, or of all experts, with activations [tokens, inputs] on the best kernel.

    Tokens choose experts evenly and independently. ``in_pass``: other calls come before and after this one.
    """
    schemes = [scheme_on(device, linear, scheme) for scheme in linear.kernels]
    kernels = [device.kernel(scheme) for scheme in schemes if scheme != HUMMING or scheme in device.kernels]
    rows = tokens * linear.active_experts
    used = linear.experts * (1 - (1 - linear.active_experts / linear.experts) ** tokens)
    activation_bytes = 1 if linear.scheme in QUANTISED_ACTIVATIONS else 2
    moved = used * linear.weight_bytes + rows * (activation_bytes * linear.inputs + 2 * linear.outputs)

    def seconds(kernel: Kernel) -> float:
        computed = _padded_outputs(linear, rows, used, kernel, device.processors)
        call = kernel.call_in_pass_seconds if in_pass else kernel.call_seconds
        parts = moved / kernel.bytes_per_s, 2 * computed * linear.inputs / kernel.flops_per_s
        return call + sum(part**device.overlap for part in parts) ** (1 / device.overlap)

    return min(map(seconds, kernels))


def preparation_seconds(linear: Linear, tokens: int, device: Device) -> float:
    """Return the time before the product, of quantising 16-bit activations [tokens, inputs] to 8 bit.

    For one copy it includes computing the INT8 weight from the stored INT4 one, by default in the time of
    reading the one and writing the other; for a nested weight, longer as it reads more. From a weight in 16
    bits it always takes that time.
    """
    memory, seconds, moved = device.kernel("bf16"), 0.0, linear.source_bytes + linear.weight_bytes
    if linear.scheme in QUANTISED_ACTIVATIONS:
        seconds += 3 * tokens * linear.inputs / memory.bytes_per_s
    if linear.is_from_int4 and device.int8_from_int4_seconds is not None:
        more = 1 + linear.difference_bytes / moved
        seconds += linear.outputs * linear.inputs / 1e6 * device.int8_from_int4_seconds * more
    elif linear.source_bytes:
        seconds += memory.call_in_pass_seconds
        seconds += (moved + linear.difference_bytes) / memory.bytes_per_s
    return seconds


def _padded_outputs(linear: Linear, rows: int, experts: float, kernel: Kernel, processors: int) -> float:
    """Return how many elements of its output [rows, outputs] a kernel computes, padding included.

    Kernels with tiles compute whole ones for each of ``experts``, in waves that each take every processor.
    """
    if not (tiles := kernel.tiles):
        return rows * linear.outputs
    rows_per_expert = ceil(rows / experts)
    tile = next((tile for tile in tiles if rows_per_expert <= tile.tokens), tiles[-1])
    blocks = ceil(experts * ceil(rows_per_expert / tile.rows) * ceil(linear.outputs / tile.columns))
    return ceil(blocks / processors) * processors * tile.rows * tile.columns


class Limits(NamedTuple):
    """The most tokens and sequences of a pass, as ``vllm serve`` (0.32) chooses them by itself."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, device: Device, devices: int = 1) -> Self:
        """Follow vLLM's ``EngineArgs.get_batch_defaults``."""
        if not device.is_gpu:
            return cls(2048 * devices, 128 * devices)
        if device.memory_bytes >= 160 * GIB:
            return cls(16384, 1024)
        is_a100 = "a100" in f"{device.name} {device.description}".lower()
        return cls(8192, 1024) if device.memory_bytes >= 70 * GIB and not is_a100 else cls(2048, 256)


@dataclass(frozen=True)
class Batches:
    """Loads to serve, each of which arrives at once; all requests are alike."""

    input_tokens: int
    output_tokens: int
    concurrency: Sequence[int]
    """Requests at once, one number for each load."""

    @property
    def request_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class Load:
    """Means over the requests of a load that all arrive at once, in seconds."""

    ttft: float
    tpot: float
    request: float
    """From arrival to the last token."""


def serve(
    batches: Batches,
    count: int,
    limits: Limits,
    kv_cache_tokens: int,
    seconds: Callable[[Phase, Batch], float],
) -> Load:
    """Serve ``count`` requests that arrive at once; ``seconds`` returns the time of a pass.

    As many requests as the KV cache holds to their end, one at least, are served together: first their
    prompts, in full passes, then all decode. The next ones come after them. vLLM's decoding beside prompts,
    padding and work between passes are left out.
    """
    prompt, steps = batches.input_tokens, batches.output_tokens - 1
    together = min(limits.sequences, kv_cache_tokens // batches.request_tokens)
    first_tokens, last_tokens, now = list[float](), list[float](), 0.0
    while len(last_tokens) < count:
        number = min(together, count - len(last_tokens))
        full, rest = divmod(number * prompt, limits.tokens)
        sizes = [limits.tokens] * full + [rest] * (rest > 0)
        batches_of = (Batch(n, ceil(n / prompt), pairs=n * (prompt + 1) / 2) for n in sizes)
        ends = list(accumulate([seconds("prefill", batch) for batch in batches_of], initial=now))
        first_tokens += [ends[ceil(n * prompt / limits.tokens)] for n in range(1, number + 1)]
        # The time of a pass is linear in the tokens that it reads, so the mean pass reads their mean.
        decode = Batch(number, number, cached=number * (prompt + (steps - 1) / 2))
        now = ends[-1] + (steps * seconds("decode", decode) if steps else 0)
        last_tokens += [now] * number
    ttft, request = fmean(first_tokens), fmean(last_tokens)
    return Load(ttft, (request - ttft) / max(1, steps), request)
