# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints whose lm_head is quantised, and the same ones with that head multiplied out."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from tests.checkpoints import StateDict, make_checkpoint
from tests.sections import PACKED, SCHEMES

HEAD, GROUP = "lm_head", "of_the_head"
LARGEST = {("int", 8): 127, ("int", 4): 7, ("float", 8): 448}


def rounded(scheme: str, weight: torch.Tensor) -> tuple[StateDict, torch.Tensor]:
    """Return a matrix's tensors in a scheme, rounded to nearest, and what they stand for in float32."""
    args, _, form = SCHEMES[scheme]
    rows, columns = weight.shape
    bits, is_int, size = args["num_bits"], args["type"] == "int", args.get("group_size", columns)
    exact, zero = weight.float().view(rows, -1, size), torch.zeros(rows, columns // size, 1)
    scale = exact.abs().amax(2, keepdim=True) / LARGEST[args["type"], bits]
    if not args["symmetric"]:
        least = exact.amin(2, keepdim=True)
        scale = (exact.amax(2, keepdim=True) - least) / 15
        zero = (-least / scale).nan_to_num().round() - 8
    scale = torch.where(scale > 0, scale, 1.0).bfloat16().float()
    values = exact / scale + zero
    values = values.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_int else values
    stored = values.to(torch.int8 if is_int else torch.float8_e4m3fn).view(rows, columns)
    found = {"weight_scale": scale.view(rows, -1).bfloat16(), "weight": stored}
    if form == PACKED:
        packed, shape = pack_to_int32(found.pop("weight"), bits), torch.tensor([rows, columns])
        found |= {"weight_packed": packed, "weight_shape": shape}
    if not args["symmetric"]:
        zero_point = pack_to_int32(zero.view(rows, -1).to(torch.int8), bits, packed_dim=0)
        found |= {"weight_zero_point": zero_point.contiguous()}
    return found, ((stored.float().view(exact.shape) - zero) * scale).view(rows, columns)


def quantise_head(source: Path, output: Path, scheme: str) -> Path:
    """Write a checkpoint of compressed-tensors with its lm_head in a scheme of `tests.sections`.

    Beside it, with ``-plain`` behind its name, the head is stored in float32 as it was rounded.
    """
    tensors, plain = load_file(source / "model.safetensors"), output.with_name(f"{output.name}-plain")
    stored, exact = rounded(scheme, tensors.pop(f"{HEAD}.weight"))
    for folder, own in ((output, stored), (plain, {"weight": exact})):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        own = {f"{HEAD}.{part}": tensor for part, tensor in own.items()}
        save_file(tensors | own, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    section, (weights, inputs, form) = config["quantization_config"], SCHEMES[scheme]
    for group in section["config_groups"].values():
        group["format"] = group.get("format") or section["format"]
    head = {"targets": [f"re:.*{HEAD}$"], "weights": weights, "input_activations": inputs, "format": form}
    section["config_groups"][GROUP] = head
    section |= {"format": "mixed-precision", "ignore": [n for n in section["ignore"] if n != HEAD]}
    (output / "config.json").write_text(json.dumps(config))
    return output


def with_an_unused_row(state: StateDict) -> StateDict:
    for name in (f"{HEAD}.weight", "model.embed_tokens.weight"):
        state[name][7] = 0
    return state


def write_pair(folder: Path, *heads: str | None, **options: Any) -> dict[str, Path]:
    """Write w8a8 and w4a16 with these schemes of their heads; None: 16 bit."""
    found = {}
    for name, head in zip(("w8a8", "w4a16"), heads, strict=True):
        given = {"scheme": name, "transform": with_an_unused_row, **options}
        made = make_checkpoint(folder / f"plain {name}", **given)
        found[name] = made if head is None else quantise_head(made, folder / name, head)
    return found
