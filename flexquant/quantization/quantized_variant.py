# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Describe a quantised variant: its folder and size, and what was searched and found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexquant.quantization.report import read_report
from flexquant.quantization.resolve import ResolvedVariant


@dataclass(frozen=True)
class QuantizedVariant:
    """A folder that ``quantize_variants`` wrote, or found finished."""

    name: str
    folder: str
    kept: bool
    """Whether an earlier run had finished it, and ``resume`` kept it."""
    seconds: float
    """Seconds of quantising and writing, without loading the calibration data; 0 if it was kept."""
    num_bytes: int
    """Size of the safetensors files."""
    group_size: int | None
    """Input features that share one weight scale; None: one scale per output channel or tensor."""
    smoothed: int
    """Number of mappings that SmoothQuant smoothed."""
    mse_gain: float | None
    """Summed output MSE of all mappings with one alpha of 0.5, divided by that with the chosen alphas."""
    spared: list[str]
    """Units kept in another scheme or in 16 bit because they are sensitive."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_quantized(variant: ResolvedVariant, folder: Path, kept: bool, seconds: float) -> QuantizedVariant:
    """Describe the finished ``folder`` of a variant, from its files and its report."""
    report = read_report(folder) or {}
    smoothing, sensitivities = report.get("smoothing") or {}, report.get("sensitivities") or {}
    gain = smoothing.get("ratios_to_per_mapping", {}).get("summed_mse", {})
    return QuantizedVariant(
        name=variant.recipe.name,
        folder=str(folder),
        kept=kept,
        seconds=seconds,
        num_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        group_size=variant.group_size,
        smoothed=sum(m["chosen"] is not None for m in smoothing.get("mappings", {}).values()),
        mse_gain=next((ratio for way, ratio in gain.items() if way.startswith("all_")), None),
        spared=[unit for unit, found in sensitivities.items() if found["spared"]],
    )
