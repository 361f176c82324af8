# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What became of one variant: a folder with its size, and what was searched and found while quantising."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexquant.quantization.report import read_report
from flexquant.quantization.resolve import ResolvedVariant


@dataclass(frozen=True)
class QuantizedVariant:
    """One folder that ``quantize_variants`` wrote, or found finished."""

    name: str
    folder: str
    kept: bool
    """Whether it was finished already, by an earlier run with ``resume``."""
    seconds: float
    """How long calibrating and writing took, without loading the calibration data; 0 when kept."""
    num_bytes: int
    """Size of the safetensors files."""
    group_size: int | None
    """Input features that share one weight scale; None: one scale per output channel or tensor."""
    smoothed: int
    """Mappings that SmoothQuant smoothed."""
    mse_gain: float | None
    """How many times smaller the summed output MSE of all mappings is than with one alpha of 0.5."""
    spared: list[str]
    """The units kept in another scheme or in 16 bit because they were found sensitive."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_quantized(variant: ResolvedVariant, folder: Path, kept: bool, seconds: float) -> QuantizedVariant:
    """Return what the finished ``folder`` of a variant, its report included, says.

    ``kept`` and ``seconds`` are taken over as they are.
    """
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
