# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write INT4 checkpoints in the formats of GPTQ and AWQ, and compare the tensors of checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import save_file

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.safetensors_io import load_tensor
from tests.checkpoints import StateDict, load_all

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Each of eight columns -> its place in a word of AWQ's GEMM format."""


def packed(values: torch.Tensor, order: list[int] | None = None, bits: int = 4) -> torch.Tensor:
    """Pack the unsigned values that fit along the last dimension into one int32 word."""
    groups = values.long().unflatten(-1, (-1, 32 // bits))
    places = torch.tensor(order or range(32 // bits)) * bits
    words = (groups << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked(state: StateDict, module: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the unsigned values [out, in], zero points [out, in / group] and scales of a linear."""
    shape = torch.Size(state[f"{module}.weight_shape"].tolist())
    values = unpack_from_int32(state[f"{module}.weight_packed"], 4, shape) + 8
    scales = state[f"{module}.weight_scale"]
    zeros = torch.full(scales.shape, 8)
    if (stored := state.get(f"{module}.weight_zero_point")) is not None:
        zeros = unpack_from_int32(stored, 4, torch.Size(scales.shape), packed_dim=0) + 8
    return values, zeros, scales


def gptq_tensors(
    values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, offset: int = 1, bits: int = 4
) -> StateDict:
    inputs = values.shape[1]
    return {
        "qweight": packed(values, bits=bits).T.contiguous(),
        "qzeros": packed((zeros.T - offset) % (1 << bits), bits=bits),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(inputs) // (inputs // scales.shape[1])).to(torch.int32),
    }


def awq_tensors(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> StateDict:
    return {
        "qweight": packed(values.T, AWQ_ORDER),
        "qzeros": packed(zeros.T, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }


def write_foreign(source: Path, output: Path, method: str, **settings: Any) -> Path:
    """Write the INT4 checkpoint in ``source`` in another format, with all else as it is.

    ``method``: ``gptq`` or ``awq``; ``settings`` are put into its ``quantization_config``.
    """
    shutil.copytree(source, output, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    state, group_size = load_all(source), 0
    written = dict(state)
    for key in [key for key in state if key.endswith(".weight_packed")]:
        module = key.removesuffix(".weight_packed")
        values, zeros, scales = unpacked(state, module)
        group_size = values.shape[1] // scales.shape[1]
        offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        parts = values, zeros, scales
        tensors = awq_tensors(*parts) if method == "awq" else gptq_tensors(*parts, offset)
        written |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        for part in ("packed", "scale", "shape", "zero_point"):
            written.pop(f"{module}.weight_{part}", None)
    save_file(written, output / "model.safetensors", metadata={"format": "pt"})
    config = config_of(source)
    symmetric = config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"]
    own: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": group_size}
    if method == "gptq":
        own |= {"desc_act": False, "sym": symmetric, "lm_head": False}
    else:
        own |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    config["quantization_config"] = own | settings
    (output / "config.json").write_text(json.dumps(config, indent=2))
    return output


def tensors_of(folder: Path) -> StateDict:
    return {key: load_tensor(ref) for key, ref in read_tensors(folder).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_equal(found: StateDict, expected: StateDict) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
