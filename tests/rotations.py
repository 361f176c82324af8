# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints as llmcompressor's QuIPModifier writes them: the inputs of down_proj are rotated, in blocks."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import StateDict, make_checkpoint

BLOCK, GROUP, PART = 32, "v", "v_input"


def rotation(seed: int | None = 0) -> torch.Tensor:
    """Return a Hadamard matrix [BLOCK, BLOCK], with random signs of columns unless ``seed`` is None."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    if seed is None:
        return matrix
    return matrix * torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)).sign()


def make_rotated(
    folder: Path, scheme: str, matrix: torch.Tensor | None = None, seed: int | None = 0, **options
) -> Path:
    """Write a checkpoint as :func:`make_checkpoint` does; only the first layer has the matrix on disk.

    Weights are rotated by :func:`rotation`. ``matrix`` is written in its place.
    """
    turn = rotation(seed) / BLOCK**0.5

    def turned(state: StateDict) -> StateDict:
        for name in (name for name in state if name.endswith("down_proj.weight")):
            blocks = state[name].float().view(len(state[name]), -1, BLOCK)
            state[name] = (blocks @ turn).flatten(1).to(state[name].dtype)
        return state

    make_checkpoint(folder, scheme=scheme, transform=turned, **options)
    targets = {"targets": ["re:.*\\.down_proj$"]}
    apply = [{**targets, "location": "input"}, {**targets, "location": "weight_input", "inverse": True}]
    group = {"type": "hadamard" if seed is None else "random-hadamard", "head_dim": BLOCK, "apply": apply}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {GROUP: group}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    stored = rotation(seed) if matrix is None else matrix
    tensors[f"model.layers.0.mlp.down_proj.{PART}.weight"] = stored.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
