# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Predict the time of one linear, and of a whole forward pass, from bytes, operations and overheads.

A linear with N outputs and K inputs takes for M tokens

    time = call + bytes / bandwidth + operations / rate

*bytes* are the stored weight with its scales, the activations and the 16-bit outputs. *operations* are
2 M N K, except for kernels with tiles: these cover M x N with whole tiles, and the tiles run in whole waves
over the processors ("tile and wave quantization", NVIDIA's Matrix Multiplication Background User's Guide), so
33 tokens in tiles of 64 rows cost as much as 64, and 64 tiles on 132 processors as much as 132. Marlin and
Machete, which run W4A16, spread their work evenly. The three parts are added, because GEMMs of tens of
microseconds hardly overlap them.

Sources of the numbers (rates and bandwidths are the data sheets'; published figures have N = K = 8192):

    calibrated, for each     ``call_us`` on W4A16's gain at M = 1; W4A16's ``efficiency`` on its loss at
    architecture             M = 8192; on Hopper W4A16's ``bandwidth`` on the gain with larger matrices
    assumed, for all GPUs    W8A8 reaches 0.6 of the rate and 0.9 of the bandwidth; ``call_in_pass_us``
                             replaces ``call_us`` in a pass and is the same for all variants
    predicted                the crossovers, all five within the published brackets

Sensitivity. The crossovers stay within the brackets if W8A8 reaches 0.55 to 0.75 of the rate and W4A16's
calibrated efficiency changes in proportion, which keeps its published loss; if W8A8's share alone changes,
from 0.55 to 0.65.

Limits. The form (a sum rather than a maximum) and the tiles were chosen with the published crossovers in
view. W8A8 is taken as FP8 on all GPUs that have FP8: with the tiles of INT8 kernels, which on Hopper have at
least 64 rows, the crossovers hold for the H100 and the A100 class only. The published figures of W4A16 are
Marlin's; on Hopper vLLM prefers Machete, which is calibrated on this repository's own run on an H100. In that
run GEMMs of 256 to 1024 tokens took W4A16 and W8A8 two thirds of what is predicted, or less; their ratio is
met. The published GEMMs were launched one by one, so they do not show ``call_in_pass_us``; as it is the same
for all variants, it moves no crossover.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flexquant.planning.device import Device
from flexquant.planning.planned_model import Linear, ModelShape

QUANTISED_ACTIVATIONS = ("w8a8", "fp8")


@dataclass(frozen=True)
class Batch:
    """What one forward pass computes."""

    tokens: int
    """Tokens, the padding to the size of a CUDA graph included."""
    sequences: int
    """Sequences; lm_head computes one row for each."""
    cached: int = 0
    """Tokens that decoding sequences read from the KV cache."""
    pairs: float = 0.0
    """Pairs of a query and a key in the attention to prompts."""


def pass_seconds(model: ModelShape, variant: str, batch: Batch, device: Device) -> float:
    """Return the seconds of a forward pass in one variant on one device; communication is left out."""
    seconds = linear_seconds(model.head, batch.sequences, device, in_pass=True)
    for linear, count in model.linears[variant].items():
        seconds += count * (
            linear_seconds(linear, batch.tokens, device, in_pass=True)
            + quantisation_seconds(linear, batch.tokens, device)
            + dequantisation_seconds(linear, device)
        )
    seconds += batch.cached * model.kv_bytes_per_token / device.kernel("bf16").bytes_per_s
    seconds += batch.pairs * model.attention_flops / device.attention_flops_per_s
    return seconds + device.pass_seconds + model.num_layers * device.layer_seconds


def scheme_on(device: Device, linear: Linear, scheme: str) -> str:
    """Return a linear's ``scheme``, or FP8 for weights computed in each pass on a device without INT8."""
    return "fp8" if linear.source_bytes and scheme not in device.kernels else scheme


def linear_seconds(linear: Linear, tokens: int, device: Device, in_pass: bool = False) -> float:
    """Return the time of one call with activations [tokens, inputs], or of all experts together.

    The model assumes that tokens choose their experts evenly and independently. ``in_pass`` tells whether
    other calls come before and after this one.
    """
    kernel = device.kernel(scheme_on(device, linear, linear.kernel))
    rows = tokens * linear.active_experts
    used = linear.experts * (1 - (1 - linear.active_experts / linear.experts) ** tokens)
    activation_bytes = 1 if linear.scheme in QUANTISED_ACTIVATIONS else 2
    moved = used * linear.weight_bytes + rows * (activation_bytes * linear.inputs + 2 * linear.outputs)
    operations = 2 * _padded_outputs(linear, rows, used, device) * linear.inputs
    call = kernel.call_in_pass_seconds if in_pass else kernel.call_seconds
    return call + moved / kernel.bytes_per_s + operations / kernel.flops_per_s


def quantisation_seconds(linear: Linear, tokens: int, device: Device) -> float:
    """Return the time of quantising 16-bit activations [tokens, inputs] to 8 bit, if the scheme does so."""
    if linear.scheme not in QUANTISED_ACTIVATIONS:
        return 0.0
    return 3 * tokens * linear.inputs / device.kernel("bf16").bytes_per_s


def dequantisation_seconds(linear: Linear, device: Device) -> float:
    """Return the time of computing a linear's INT8 weight from the stored INT4 one, if each pass does so.

    It reads the one and writes the other at the memory's bandwidth; the product reads it again.
    """
    if not linear.source_bytes:
        return 0.0
    kernel = device.kernel("bf16")
    return kernel.call_in_pass_seconds + (linear.source_bytes + linear.weight_bytes) / kernel.bytes_per_s


def _padded_outputs(linear: Linear, rows: int, experts: float, device: Device) -> float:
    """Return how many elements of its output [rows, outputs] a kernel computes, padding included.

    A kernel with tiles computes whole tiles for each of the ``experts`` experts in use. Its last wave takes
    as long as if every processor had a tile.
    """
    tiles = device.kernel(scheme_on(device, linear, linear.scheme)).tiles
    if not tiles:
        return rows * linear.outputs
    rows_per_expert = ceil(rows / experts)
    tile = next((tile for tile in tiles if rows_per_expert <= tile.tokens), tiles[-1])
    blocks = ceil(experts * ceil(rows_per_expert / tile.rows) * ceil(linear.outputs / tile.columns))
    return ceil(blocks / device.processors) * device.processors * tile.rows * tile.columns
