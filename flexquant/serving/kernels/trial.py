# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the fastest of several kernels for a layer, timed once on a machine and then kept.

Kernels are timed on linear layers of random weights, in a process of its own
(``python -m flexquant.serving.kernels.trial REQUEST REPLY``): zentorch remembers the layout of weights by
their address, and would mistake weights that are loaded later at the same address for those of a trial.

A result is a file in vLLM's cache folder, so that the next start, and the other ranks of this one, take the
same kernels. To time them anew, delete the folder ``flexquant/cpu_kernels`` there.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import digest_of, versions_of
from flexquant.serving.kernels import cpu_model
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.kernels.layers import LinearKernel
from flexquant.serving.vllm_api import (
    Int8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
    ScaledMMLinearKernel,
    envs,
    scalar_types,
    set_default_torch_dtype,
)

logger = init_logger("vllm.flexquant.cpu")

CLEARLY = 0.95
"""Share of the first kernel's time below which another kernel is chosen."""
TIMEOUT = 600
"""Largest number of seconds for all trials of a start."""
COLD_BYTES = 64 << 20
"""Bytes of all copies of a layer; like a model's, its weights then come from memory, not from caches."""
MAX_COPIES = 8
MANY_TOKENS = 64
"""Tokens from which on one copy and one run suffice, since multiplying then dominates reading weights."""
RUNS = 5


def find_fastest(layers: Sequence[JsonObject]) -> list[str]:
    """Return the name of the fastest kernel for each layer, by the geometric mean of the times over sizes.

    ``layers`` are those of :func:`measure`. The first kernel is kept unless another is clearly faster.
    """
    keys = [{**_circumstances(), **layer} for layer in layers]
    folder = Path(envs.VLLM_CACHE_ROOT) / "flexquant" / "cpu_kernels"
    files = [folder / f"{digest_of(key)[:32]}.json" for key in keys]
    missing = [i for i, key in enumerate(keys) if _read(files[i], key) is None]
    chosen = [layer["kernels"][0] for layer in layers]
    if missing:
        logger.info("FlexQuant tries which CPU kernels are the fastest, once on this machine")
        try:
            measured = _try([layers[i] for i in missing])
        except (OSError, subprocess.SubprocessError, ValueError) as e:
            logger.warning("FlexQuant could not try CPU kernels, and takes vLLM's: %s", e)
            measured = []
        for i, times in zip(missing, measured, strict=False):
            chosen[i] = _least(times, chosen[i])
            _write(files[i], {"key": keys[i], "chosen": chosen[i], "microseconds": times})
    return [_read(file, key) or first for file, key, first in zip(files, keys, chosen, strict=True)]


def _least(times: dict[str, dict[str, float]], first: str) -> str:
    means = {name: statistics.geometric_mean(found.values()) for name, found in times.items()}
    means[first] *= CLEARLY
    return min(means, key=lambda name: means[name])


def _try(layers: list[JsonObject]) -> list[dict[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder) / "request.json", Path(folder) / "reply.json"
        request.write_text(
            json.dumps({"threads": torch.get_num_threads(), "layers": layers}), encoding="utf-8"
        )
        command = [sys.executable, "-m", "flexquant.serving.kernels.trial", str(request), str(reply)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode:
            raise OSError(f"the process ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        return json.loads(reply.read_text(encoding="utf-8"))


def _circumstances() -> JsonObject:
    versions = versions_of(("torch", "vllm", "zentorch"))
    return {"cpu": cpu_model(), "threads": torch.get_num_threads(), "versions": versions}


def _read(file: Path, key: JsonObject) -> str | None:
    """Return an earlier trial's choice; None if there is none, or if its file cannot be used."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found["chosen"] if found["key"] == key and found["chosen"] in key["kernels"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, found: JsonObject) -> None:
    """Store a trial, unless another rank was first or the folder is not writable."""
    written = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(found, indent=1), encoding="utf-8")
        if _read(file, found["key"]) is None:
            os.replace(written, file)
    except OSError as e:
        logger.warning("FlexQuant will try the CPU kernels again at the next start: %s", e)
    finally:
        written.unlink(missing_ok=True)


def main(request: str, reply: str) -> None:
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    provide_cpu_kernels()
    torch.set_num_threads(asked["threads"])
    with torch.inference_mode():
        found = [measure(layer) for layer in asked["layers"]]
    Path(reply).write_text(json.dumps(found), encoding="utf-8")


def measure(layer: JsonObject) -> dict[str, dict[int, float]]:
    """Return kernel -> number of tokens -> microseconds; the kernels take turns.

    ``layer`` has ``inputs``, ``outputs``, ``dtype``, ``group_size`` (for INT4; None for INT8), ``sizes`` in
    tokens, and ``kernels`` as ``module:class``.
    """
    nbytes = layer["inputs"] * layer["outputs"] // 2
    copies = min(MAX_COPIES, max(2, math.ceil(COLD_BYTES / nbytes)))
    dtype = getattr(torch, layer["dtype"])
    made = {name: [_make(name, layer, dtype) for _ in range(copies)] for name in layer["kernels"]}
    times: dict[str, dict[int, float]] = {name: {} for name in made}
    for size in layer["sizes"]:
        x = torch.randn(size, layer["inputs"], dtype=dtype)
        used, runs = (1, 1) if size >= MANY_TOKENS else (copies, RUNS)
        found: dict[str, list[float]] = {name: [] for name in made}
        for run in range(runs + 1):
            for name, multiplies in made.items():
                started = time.perf_counter()
                for multiply in multiplies[:used]:
                    multiply(x)
                if run > 0:  # the first run sets the kernel up for this size
                    found[name].append(time.perf_counter() - started)
        for name, seconds in found.items():
            times[name][size] = round(statistics.median(seconds) / used * 1e6, 1)
    return times


def _make(name: str, layer: JsonObject, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a layer as a function of its inputs [tokens, in]."""
    module, _, kind = name.partition(":")
    make = getattr(importlib.import_module(module), kind)
    kernel: LinearKernel
    kernel, linear = _int8(make, layer) if layer["group_size"] is None else _int4(make, layer, dtype)
    with set_default_torch_dtype(dtype):  # oneDNN's kernel uses it as the dtype of its outputs
        kernel.process_weights_after_loading(linear)
    return lambda x: kernel.apply_weights(linear, x, None)


def _int4(make: type[MPLinearKernel], layer: JsonObject, dtype: torch.dtype) -> tuple[MPLinearKernel, Any]:
    """Make INT4 weights as compressed-tensors stores them: [out, in / 8], scales [out, groups].

    Zero points, if ``layer`` has them, are [out / 8, groups].
    """
    inputs, outputs, group = layer["inputs"], layer["outputs"], layer["group_size"]
    shape = (inputs, outputs)
    groups, zeros = inputs // group if group > 0 else 1, layer["zero_points"]
    linear = _linear(
        weight_packed=torch.empty(outputs, inputs // 8, dtype=torch.int32).random_(),
        weight_scale=torch.empty(outputs, groups, dtype=dtype).uniform_(0.001, 0.002),
        weight_zero_point=torch.empty(outputs // 8, groups, dtype=torch.int32).random_() if zeros else None,
    )
    vars(linear.weight_packed)["packed_dim"] = 1
    has_g_idx = any(field.name == "has_g_idx" for field in dataclasses.fields(MPLinearLayerConfig))
    required: JsonObject = {"has_g_idx": False} if has_g_idx else {}  # by vLLM 0.29 and older
    kind = scalar_types.uint4 if zeros else scalar_types.uint4b8
    config = MPLinearLayerConfig(shape, shape, kind, dtype, group, zero_points=zeros, **required)
    return make(config, "weight_packed", "weight_scale", "weight_zero_point"), linear


def _int8(make: type[ScaledMMLinearKernel], layer: JsonObject) -> tuple[ScaledMMLinearKernel, Any]:
    """Make INT8 weights [out, in] with a scale for each output, for activations quantised per token."""
    names = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
    linear = _linear(
        weight=torch.empty(layer["outputs"], layer["inputs"], dtype=torch.int8).random_(-127, 128),
        weight_scale=torch.empty(layer["outputs"], 1).uniform_(0.001, 0.002),
        **dict.fromkeys(names[2:]),
    )
    linear.logical_widths = [layer["outputs"]]
    config = Int8ScaledMMLinearLayerConfig(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True
    )
    return make(config, names), linear


def _linear(**weights: torch.Tensor | None) -> Any:
    """Return what vLLM's kernels read of a linear layer, which has no bias here."""
    linear = nn.Module()
    for name, weight in {"bias": None, **weights}.items():
        parameter = None if weight is None else nn.Parameter(weight, requires_grad=False)
        if parameter is not None:
            vars(parameter).update(output_dim=0, input_dim=1)
        linear.register_parameter(name, parameter)
    return linear


if __name__ == "__main__":
    main(*sys.argv[1:])
