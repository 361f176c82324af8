# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantises with few samples, holds recipes as data, and reads back what was written into a folder."""

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file

from flexquant.quantization.progress import Stage
from flexquant.quantization.quantizing import quantize_variants
from flexquant.quantization.recipe import SCHEMA, Recipe, load_recipe, parse_recipe
from flexquant.quantization.report import QuantizedVariant

FEW: dict[str, Any] = {"samples": 4, "length": 64}
OPTIONS = [argument for key, value in FEW.items() for argument in (f"--{key}", str(value))]

RTN = {"QuantizationModifier": {"ignore": ["lm_head"], "scheme": "W8A8"}}
"""A variant that takes seconds to make."""
W4A16 = {"GPTQModifier": {"ignore": ["lm_head"], "scheme": "W4A16", "group_size": [128, 64, 32]}}


def recorder(titles: list[str]) -> Stage:
    """Return a function to pass as ``stage``, which appends the titles of all stages."""

    def stage(title: str, **unit: str) -> AbstractContextManager[None]:
        titles.append(title)
        return nullcontext()

    return stage


def recipe(**variants: Any) -> Recipe:
    document = {"schema": SCHEMA, "variants": variants}
    return parse_recipe(yaml.safe_dump(document, sort_keys=False).encode(), "test.yaml", "test")


def quantize(
    model: Path, output: Path, by: Recipe | str = "default", *variants: str, **options: Any
) -> list[QuantizedVariant]:
    by = load_recipe(by) if isinstance(by, str) else by
    return quantize_variants(model, output, by, **{"variants": variants or None, **FEW, **options})


def section(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "quantization_report.json").read_text())


def weight(folder: Path, name: str) -> torch.Tensor:
    """Return the dequantised weight [out, in]."""
    tensors = load_file(folder / "model.safetensors")
    if f"{name}.weight_packed" in tensors:
        q = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, tensors[f"{name}.weight_shape"])
    else:
        q = tensors[f"{name}.weight"]
    if f"{name}.weight_scale" not in tensors:
        return q.float()
    scale = tensors[f"{name}.weight_scale"].float()
    return q.float() * scale.repeat_interleave(q.shape[1] // scale.shape[1], dim=1)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
