# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Reads back what was written into a variant's folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file


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
