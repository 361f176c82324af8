# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Devices, GEMMs and models whose costs are predicted, and parts of their costs by hand."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.yaml_document import from_yaml
from flexquant.planning.device import parse_device
from flexquant.planning.planned_model import Linear, PlannedModel
from flexquant.planning.roofline import Batch

DEVICE = """schema: flexquant.device/v1
description: round numbers
memory_gib: 1
memory_gb_per_s: 100
tflops: {bf16: 10, int8: 20}
processors: 4
call_us: 5
layer_us: 3
pass_us: 100
reserve_gib: 0.25
kernels:
  bf16: {efficiency: 0.5, bandwidth: 0.5}
  w8a8: {efficiency: 0.5, bandwidth: 0.5, tiles: {16: 16x64, 64: 64x64}}
  w4a16: {tflops: 4, gb_per_s: 80, call_us: 7}
"""


def square(scheme: str, outputs: int = 8192, inputs: int = 8192) -> Linear:
    """Return a GEMM of the published tables; INT4 has groups of 128 with 16-bit scales."""
    width = {"bf16": 2, "w8a8": 1, "fp8": 1, "w4a16": 0.5 + 2 / 128}[scheme.partition("-")[0]]
    return Linear(outputs, inputs, width * outputs * inputs, scheme)


def planned(folder: Path, config: JsonObject) -> PlannedModel:
    """Return what is read of a model with this ``config.json``, which is written into ``folder``."""
    (folder / "config.json").write_text(json.dumps(config))
    return PlannedModel.read(str(folder))


def language_model(
    kind: str, hidden: int, layers: int, heads: tuple[int, int], intermediate: int, vocab: int, **more: Any
) -> JsonObject:
    """Return a ``config.json``; ``heads`` are those of queries and of keys."""
    found = {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab}
    found |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return found | {"intermediate_size": intermediate, **more}


UNLIKE_FILE = """schema: flexquant.device/v1
description: no two numbers alike
memory_gib: 2
memory_gb_per_s: 100
tflops: {bf16: 10, int8: 24, fp8: 26}
processors: 7
call_us: 11
call_in_pass_us: 3
layer_us: 13
pass_us: 170
attention_tflops: 4.5
reserve_gib: 0.3
kernels:
  bf16: {efficiency: 0.5, bandwidth: 0.55}
  w8a8: {efficiency: 0.25, bandwidth: 0.7, tiles: {32: 16x64, 128: 64x96}}
  fp8: {tflops: 8, gb_per_s: 75}
  w4a16: {tflops: 4, gb_per_s: 80}
  w4a16-marlin: {tflops: 3, gb_per_s: 90}
"""
UNLIKE = parse_device(from_yaml(UNLIKE_FILE.encode(), "unlike.yaml", "device", ()), "unlike")
"""A device of numbers no two of which are alike."""
BF16, FP8, W4A16, MARLIN = (5e12, 55e9), (8e12, 75e9), (4e12, 80e9), (3e12, 90e9)
"""Operations and bytes a second."""
W8A8_BYTES, W8A8_OPERATIONS, ATTENTION = 70e9, 6e12, 4.5e12

# Inputs are multiples of 64, not all of 128: INT4 has groups of 64.
DENSE = language_model("qwen3", 320, 3, (8, 2), 640, 1001, head_dim=48, tie_word_embeddings=False)
MIXTURE = language_model("qwen3_moe", 256, 2, (4, 2), 512, 1000, head_dim=80, tie_word_embeddings=False)
MIXTURE |= {"moe_intermediate_size": 192, "num_experts": 6, "num_experts_per_tok": 2}
HYBRID = language_model("lfm2", 256, 3, (4, 2), 448, 1000, tie_word_embeddings=True)
HYBRID |= {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
MODELS = {"dense": DENSE, "mixture": MIXTURE, "hybrid": HYBRID}


@cache
def model(name: str) -> PlannedModel:
    with TemporaryDirectory() as folder:
        return planned(Path(folder), MODELS[name])


def decode(sequences: int, context: int) -> Batch:
    """Return a pass of sequences with one new token each and ``context`` tokens in the KV cache."""
    return Batch(sequences, sequences, cached=sequences * context)


def prefill(tokens: int) -> Batch:
    """Return a pass of one prompt, with an empty KV cache."""
    return Batch(tokens, 1, pairs=tokens * (tokens + 1) / 2)


# Parts of the time of one call by its outputs and inputs, each a (memory, compute) in seconds.
Parts = tuple[float, float]
Call = Callable[[int, int], Parts]


def total(*parts: Parts) -> Parts:
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def times(count: int, parts: Parts) -> Parts:
    return count * parts[0], count * parts[1]


def in_16_bit(tokens: int) -> Call:
    def call(outputs: int, inputs: int) -> Parts:
        moved = 2 * outputs * inputs + tokens * (2 * inputs + 2 * outputs)
        return moved / BF16[1], 2 * tokens * outputs * inputs / BF16[0]

    return call


def in_int4(tokens: int, *rates: Parts) -> Call:
    """Return calls of the fastest of kernels with half a byte a weight, and two for the scale of 64."""

    def call(outputs: int, inputs: int) -> Parts:
        stored = outputs * inputs / 2 + 2 * outputs * inputs / 64
        moved, operations = stored + tokens * (2 * inputs + 2 * outputs), 2 * tokens * outputs * inputs
        return min(((moved / b, operations / o) for o, b in rates or (W4A16, MARLIN)), key=sum)

    return call


def dense_layer(call: Call) -> Parts:
    """Return a layer of DENSE, with 8 + 2 x 2 heads of 48."""
    return total(call(12 * 48, 320), call(320, 384), call(1280, 320), call(320, 640))
