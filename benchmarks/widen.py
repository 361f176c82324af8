# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Widen a Llama by zeros, so that groups of 128 divide the inputs of all its linears.

    python -m benchmarks.widen MODEL OUTPUT

The wider model computes the same, up to the rounding of its norms' weights. So a small model is quantised as
publishers quantise large ones.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 128


def widen(source: Path, output: Path) -> None:
    """Write the wider model; ``source`` has its weights in one file."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    narrow, head, kv = (config[name] for name in ("hidden_size", "head_dim", "num_key_value_heads"))
    of_kv = config["num_attention_heads"] // kv
    kv += next(more for more in range(GROUP) if (kv + more) * of_kv * head % GROUP == 0)
    heads, hidden = kv * of_kv, kv * of_kv * head
    middle = -(-config["intermediate_size"] // GROUP) * GROUP
    shapes = dict.fromkeys("kv", (kv * head, hidden)) | {"down": (hidden, middle)}
    shapes |= dict.fromkeys("qo", (hidden, hidden)) | dict.fromkeys(("gate", "up"), (middle, hidden))
    state = load_file(source / "model.safetensors")
    for name, weight in state.items():
        if weight.dim() == 1:  # of a norm, which takes the mean of more squares
            weight, shape = weight * (narrow / hidden) ** 0.5, (hidden,)
        else:
            shape = shapes.get(name.split(".")[-2].removesuffix("_proj"), (len(weight), hidden))
        state[name] = torch.zeros(shape, dtype=weight.dtype)
        state[name][tuple(map(slice, weight.shape))] = weight
    config |= {"hidden_size": hidden, "intermediate_size": middle, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv, "rms_norm_eps": config["rms_norm_eps"] * narrow / hidden}
    shutil.copytree(source, output, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    save_file(state, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


if __name__ == "__main__":
    widen(*map(Path, sys.argv[1:3]))
