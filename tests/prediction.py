# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A device, GEMMs and models whose costs are predicted."""

from __future__ import annotations

import json
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.planning.planned_model import Linear, PlannedModel

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
    width = {"bf16": 2, "w8a8": 1, "fp8": 1, "w4a16": 0.5 + 2 / 128}[scheme.removesuffix("-marlin")]
    return Linear(outputs, inputs, width * outputs * inputs, scheme)


def planned(folder: Path, config: JsonObject) -> PlannedModel:
    """Return what is read of a model with this ``config.json``, which is written into ``folder``."""
    (folder / "config.json").write_text(json.dumps(config))
    return PlannedModel.read(str(folder))
