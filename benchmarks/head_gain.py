# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What would an lm_head in INT8 gain in decode, by the model of passes that `flexquant advise` predicts with?

    python -m benchmarks.head_gain --device h200 l4 --output benchmarks/results/head-gain.json

Nothing is measured. The INT8 head is taken to be read as fast as INT4 weights by the fastest of their
kernels. All models are of Llama's form.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.result import origin, write_result
from benchmarks.speed.shapes import SHAPES, Shape
from flexquant.planning.device import Device, load_device
from flexquant.planning.planned_model import PlannedModel
from flexquant.planning.roofline import Batch, pass_seconds

MODELS = {
    "Llama 3.2 1B": Shape(2048, 8192, 16, heads=32, kv_heads=8, head_dim=64, vocabulary=128256, tied=True),
    "Gemma 3 4B": Shape(2560, 10240, 34, heads=8, kv_heads=4, head_dim=256, vocabulary=262208, tied=True),
    "Qwen3 4B": Shape(2560, 9728, 36, heads=32, kv_heads=8, head_dim=128, vocabulary=151936, tied=True),
    "Qwen2.5 7B": Shape(3584, 18944, 28, heads=28, kv_heads=4, head_dim=128, vocabulary=152064),
    "Llama 3.1 8B": SHAPES["llama-3.1-8b"],
    "Qwen3 14B": Shape(5120, 17408, 40, heads=40, kv_heads=8, head_dim=128, vocabulary=151936),
    "Qwen2.5 32B": SHAPES["qwen2.5-32b"],
    "Llama 3.1 70B": replace(SHAPES["llama-70b-8layers"], layers=80),
}
SCHEMES = ("w4a16", "w8a8", "bf16")
SEQUENCES = (1, 8, 32)
CACHED = 1024
"""Tokens of each sequence in the KV cache."""


def gains(shape: Shape, device: Device) -> dict[str, Any]:
    """Return the head's share of the bytes that a token reads, and by sequences a pass's relative time."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
        model = PlannedModel.read(folder).shape(SCHEMES, 1, {})
    half = model.head.weight_bytes / 2 + 2 * model.head.outputs
    in_int8 = replace(model, head=replace(model.head, scheme="w4a16", weight_bytes=half))
    found = {}
    for variant in SCHEMES:
        layers = sum(count * linear.weight_bytes for linear, count in model.linears[variant].items())
        ratios = {}
        for count in SEQUENCES:
            batch = Batch(count, count, cached=count * CACHED)
            ratio = pass_seconds(in_int8, variant, batch, device) / pass_seconds(
                model, variant, batch, device
            )
            ratios[str(count)] = round(ratio, 3)
        share = model.head.weight_bytes / (layers + model.head.weight_bytes)
        found[variant] = {"head_share": round(share, 3), "time": ratios}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", nargs="+", default=["h200"], help="that `flexquant advise` knows")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    devices = {name: load_device(name) for name in args.device}
    found = {
        name: {model: gains(shape, device) for model, shape in MODELS.items()}
        for name, device in devices.items()
    }
    write_result(args.output, {**origin("benchmarks.head_gain"), "cached": CACHED, "devices": found})


if __name__ == "__main__":
    main()
