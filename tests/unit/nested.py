# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""W4A16 with or without zero points, a pair of which W8A8 can be nested, and what is an exception."""

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from tests.checkpoints import base_config, make_checkpoint, random_state_dict
from tests.foreign import config_of
from tests.publishers import edits
from tests.unit.edits import in_float32, smooth_norms


def make_w4a16(folder: Path, group: int | None, symmetric: bool, **config: int) -> Path:
    """Write W4A16 in groups of inputs (None: one a row), with zero points unless it is symmetric."""
    make_checkpoint(folder, scheme="w4a16", group_size=1, **config)
    state, _ = random_state_dict(base_config(**config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]:
        weight = state[name].float().unflatten(1, (-1, group or state[name].shape[1]))
        low, high = weight.amin(2).clamp_max(0), weight.amax(2).clamp_min(0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / 15).to(torch.bfloat16)
        zero = torch.zeros_like(low) if symmetric else torch.round(-8 - low / scale.float()).clamp(-8, 7)
        codes = torch.round(weight / scale.float()[..., None] + zero[..., None]).clamp(-8, 7)
        tensors[f"{name}_packed"] = pack_to_int32(codes.flatten(1).to(torch.int8), 4)
        tensors[f"{name}_scale"] = scale
        if not symmetric:
            tensors[f"{name}_zero_point"] = pack_to_int32(zero.to(torch.int8), 4, packed_dim=0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    groups = config_of(folder)["quantization_config"]["config_groups"]
    strategy = "group" if group else "channel"
    groups["group_0"]["weights"] |= {"group_size": group, "strategy": strategy, "symmetric": symmetric}
    edits.section(config_groups=groups)(folder)
    return folder


def make_nested_pair(folder: Path) -> dict[str, Path]:
    """Write a smoothed W8A8, and W4A16 in groups of 32 with zero points."""
    return {
        "w8a8": make_checkpoint(folder / "w8a8", scheme="w8a8", transform=in_float32(smooth_norms())),
        "w4a16": make_w4a16(folder / "w4a16", 32, symmetric=False),
    }


def exceptions_by_the_page(missed: np.ndarray) -> np.ndarray:
    """Return the inputs of a row's exceptions by FORMAT.md, from how far clamped integers are off."""
    first = sorted(range(len(missed)), key=lambda i: (-abs(int(missed[i])), i))
    return np.sort(first[: (len(missed) + 127) // 128])
