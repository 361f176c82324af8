# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints in INT8 as AMD's Quark exports them."""

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from flexquant.checkpoint.model_config import JsonObject
from tests.publishers import edits

EXPORT = {
    **{"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder"},
    **{"weight_format": "real_quantized", "weight_merge_groups": None},
}


def quark_int8(
    *, by: str, static: bool, symmetric: bool = True, layers: Mapping[str, Mapping[str, Any]] | None = None
) -> edits.Edit:
    """Quantise a 16-bit checkpoint to INT8 as AMD's Quark exports it.

    ``by`` is ``per_tensor`` or ``per_channel``; ``static`` activations have one scale a linear. ``layers``:
    these arguments for the linears that fit a pattern, the first that does.
    """
    options = {"by": by, "static": static, "symmetric": symmetric}
    by_pattern = {pattern: options | own for pattern, own in (layers or {}).items()}

    def quantise(state: dict[str, torch.Tensor]) -> None:
        for key in [key for key in state if key.endswith("_proj.weight")]:
            module = key.removesuffix(".weight")
            own = next((own for p, own in by_pattern.items() if fnmatch(module, p)), options)
            _quantise_as_quark(state, module, **own)

    def apply(folder: Path) -> None:
        edits.tensors(quantise)(folder)
        settings = {
            **{"quant_method": "quark", "quant_mode": "eager_mode"},
            "global_quant_config": _quark_settings(**options),
            "layer_quant_config": {p: _quark_settings(**own) for p, own in by_pattern.items()},
            **{"layer_type_quant_config": {}, "kv_cache_quant_config": {}},
            **{"exclude": ["lm_head"], "algo_config": None, "export": EXPORT},
        }
        edits.config(quantization_config=settings)(folder)

    return apply


def _quark_settings(by: str, static: bool, symmetric: bool) -> JsonObject:
    weight = {"dtype": "int8", "is_dynamic": False, "qscheme": by, "ch_axis": 0, "symmetric": True}
    inputs = {"dtype": "int8", "is_dynamic": not static, "symmetric": symmetric}
    by_token = {"qscheme": "per_channel", "ch_axis": 1}
    inputs |= {"qscheme": "per_tensor", "ch_axis": None} if static else by_token
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}


def _quantise_as_quark(
    state: dict[str, torch.Tensor], module: str, by: str, static: bool, symmetric: bool
) -> None:
    w = state[f"{module}.weight"].float()
    scale = w.abs().amax(1 if by == "per_channel" else (0, 1)) / 127
    scale = scale.bfloat16() if by == "per_channel" else scale
    rows = scale[:, None] if by == "per_channel" else scale
    state[f"{module}.weight"] = (w / rows).round().clamp(-128, 127).to(torch.int8)
    state[f"{module}.weight_scale"] = scale
    state[f"{module}.weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
    if static:
        state[f"{module}.input_scale"] = torch.tensor(0.04)
        state[f"{module}.input_zero_point"] = torch.tensor(0 if symmetric else -9, dtype=torch.int8)
