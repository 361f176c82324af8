# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Time vLLM's own linear layers, scheme against scheme, at one layer shape and number of tokens a cell.

Layers are built as a model builds them: from a compressed-tensors section, weights loaded,
``process_weights_after_loading``, so that vLLM chooses the kernel. Quantising the activations is part of the
time. Each scheme gets several copies of its layer, together larger than the caches, and runs through them in
turn: a model too finds its weights in memory. On a GPU a pass over the copies is one CUDA graph, timed with
events; schemes take turns.

Run as a program, this is the process that measures; :func:`measure_kernels` asks it for what is missing.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.speed.models import Model
from benchmarks.speed.results import Results
from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.synthetic import group_size, linear_tensors, quantisation_section
from benchmarks.speed.worker import Worker, WorkerError, answer_requests
from flexquant.serving.kernels.choice import has_zentorch, possible_kernels
from flexquant.serving.kernels.layers import exchange_kernel, kernel_of_layer
from flexquant.serving.kernels.trial import have_ranks, timed_pass

ROTATED_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
"""Bytes of weights that all copies of a layer have together: several times the L2 of an H200 (50 MB)."""
MAX_COPIES = 16
MIN_ROUNDS, MAX_ROUNDS = 5, 40
NAME = "model.layers.0.mlp.down_proj"
KERNELS = "kernels"
ACTIVATIONS = {"w4a8": "int8", "w4a8-fp8": "fp8"}
"""Schemes of INT4 weights -> the precision of their activations."""
COMPUTED = ("one-copy", "nested")
"""Schemes whose INT8 weights are computed in each pass."""


class NoKernelError(Exception):
    """This device or this version has no kernel for a scheme; the message says why."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return for every scheme its kernel, times and rates, or why there are none.

    ``request``: ``outputs``, ``inputs``, ``tokens``, ``schemes``, and ``seconds`` to spend.
    """
    found: dict[str, Any] = {}
    passes: dict[str, tuple[Callable[[], float], int]] = {}
    with torch.inference_mode():
        x = torch.randn(request["tokens"], request["inputs"], dtype=torch.bfloat16, device=device())
        for scheme in request["schemes"]:
            try:
                layers, nbytes = build_layers(scheme, request["outputs"], request["inputs"])
                passes[scheme] = prepare_pass(layers, x), len(layers)
                found[scheme] = {"kernel": kernel_name(layers[0]), "weight_bytes": nbytes}
            except NoKernelError as e:
                found[scheme] = {"unavailable": str(e)}
        times: dict[str, list[float]] = {scheme: [] for scheme in passes}
        started = time.perf_counter()
        for number in range(MAX_ROUNDS):
            if number >= MIN_ROUNDS and time.perf_counter() - started > request["seconds"]:
                break
            for scheme, (run, copies) in passes.items():
                times[scheme].append(run() / copies)
    for scheme, seconds in times.items():
        sizes = {name: request[name] for name in ("outputs", "inputs", "tokens")}
        found[scheme] |= summarise(seconds, found[scheme]["weight_bytes"], **sizes)
    return found


def summarise(
    seconds: list[float], weight_bytes: int, outputs: int, inputs: int, tokens: int
) -> dict[str, Any]:
    """Return median and quartiles in microseconds, and GB/s and TFLOP/s at the median.

    The bytes are the weights with their scales, and the 16-bit inputs and outputs once.
    """
    ordered = sorted(seconds)
    median = ordered[len(ordered) // 2]
    moved = weight_bytes + 2 * tokens * (inputs + outputs)
    return {
        "microseconds": median * 1e6,
        "microseconds_quartiles": [ordered[len(ordered) // 4] * 1e6, ordered[3 * len(ordered) // 4] * 1e6],
        "rounds": len(seconds),
        "gb_per_s": moved / median / 1e9,
        "tflop_per_s": 2 * tokens * inputs * outputs / median / 1e12,
    }


@functools.lru_cache(maxsize=8)
def build_layers(scheme: str, outputs: int, inputs: int) -> tuple[list[nn.Module], int]:
    """Return copies of a linear [inputs -> outputs] with equal random weights, ready to run, and one's bytes.

    ``scheme`` may name a kernel, as in ``w4a16@humming``; ``one-copy`` and ``nested`` compute INT8 weights
    from that kernel's INT4 weights in each pass. The bytes are those of the weights and scales that the
    kernel holds (see :mod:`flexquant.serving.worker.weight_memory`), for nested weights without the INT4
    weights. Raises NoKernelError.
    """
    scheme, _, kernel = scheme.partition("@")
    weight_bytes = outputs * inputs * {"bf16": 2, "w8a8": 1, "fp8": 1, "w8a16": 1}.get(scheme, 0.5)
    copies = min(MAX_COPIES, max(1, round(ROTATED_BYTES[device()] / weight_bytes)))
    stored = "w4a16" if scheme in (*ACTIVATIONS, *COMPUTED) else scheme
    tensors = linear_tensors(stored, outputs, inputs, NAME)
    try:
        built = [build_layer(scheme, stored, outputs, inputs, tensors, kernel) for _ in range(copies)]
    except (ValueError, RuntimeError, NotImplementedError, ImportError) as e:
        raise NoKernelError(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
    return [layer for layer, _ in built], built[0][1]


def build_layer(
    scheme: str, stored: str, outputs: int, inputs: int, tensors: dict[str, torch.Tensor], kernel: str = ""
) -> tuple[nn.Module, int]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    from flexquant.serving.worker.one_copy import make_ready, nesting_in, one_copy_of, read_sources
    from flexquant.serving.worker.plan_views import stack_of_layers
    from flexquant.serving.worker.weight_memory import WeightMemory

    section = quantisation_section(stored, group_size(inputs))
    config = CompressedTensorsConfig.from_config(section) if section else None
    # vLLM builds models under the default dtype of their activations; FP8 layers keep it for their output.
    with (
        set_current_vllm_config(vllm_config()),
        torch.device(device()),
        set_default_torch_dtype(torch.bfloat16),
    ):

        def linear() -> ReplicatedLinear:
            return ReplicatedLinear(
                inputs,
                outputs,
                bias=False,
                params_dtype=torch.bfloat16,
                quant_config=config,
                prefix=NAME,
                return_bias=False,
                disable_tp=True,
            )

        layer = linear()
        if scheme in ACTIVATIONS:
            use_8bit_activations(layer, ACTIVATIONS[scheme])
        if device() == "cpu" or kernel or scheme in COMPUTED:
            take_kernel(layer, kernel, scheme in COMPUTED)
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(tensors[name])
        memory = WeightMemory({scheme: layer})
        layer.quant_method.process_weights_after_loading(layer)
        nbytes = memory.nbytes()[scheme]
        if scheme == "one-copy":
            model = one_copy_of(_as_model(layer), scheme, "int8")
            make_ready([model])
            layer = stack_of_layers(model)[0]
        elif scheme == "nested":
            with nesting_in(_as_model(layer), config):
                layer = linear()
            for name, parameter in layer.named_parameters():
                fill_nested(name, parameter)
            model = _as_model(layer)
            read_sources(model, scheme)
            nbytes = sum(parameter.nbytes for parameter in layer.parameters())
            make_ready([model])
    return layer, nbytes


def fill_nested(name: str, parameter: nn.Parameter) -> None:
    """Give a parameter of a nested linear values of which none is out of INT8's reach."""
    if name == "weight_exception_input":
        parameter.data.copy_(128 * torch.arange(parameter.shape[1]))
    elif parameter.is_floating_point():
        parameter.data.fill_(0.5)
    else:
        parameter.data.random_(0, 100)


def _as_model(layer: nn.Module) -> nn.Module:
    """Return a model of one decoder layer, which is ``layer``."""
    model, decoder = nn.Module(), nn.Module()
    decoder.layers = nn.ModuleList([layer])
    model.model = decoder
    return model


def use_8bit_activations(layer: nn.Module, activations: str) -> None:
    from flexquant.errors import FlexQuantError
    from flexquant.serving.worker import w4a8

    try:
        w4a8.use_8bit_activations(layer, activations)
    except FlexQuantError as e:
        raise NoKernelError(str(e)) from e


def take_kernel(layer: Any, name: str, read_again: bool = False) -> None:
    """Give a layer the kernel whose class name begins with ``name``, or vLLM's first in its precision.

    A layer that is ``read_again`` gets one with a known layout. Raises NoKernelError if there is none.
    """
    from flexquant.serving.worker.one_copy import readable_kinds

    found = kernel_of_layer(layer)
    kinds = possible_kernels(found) if found else []
    if read_again and found:
        kinds = readable_kinds(found, kinds)
    those = [kind for kind in kinds if kind.__name__.lower().startswith(name.lower())]
    if (name or read_again) and not those:
        raise NoKernelError(f"{name} is not among {', '.join(k.__name__ for k in kinds) or 'none'}")
    if those:
        exchange_kernel(layer, those[0])


def has_stock_w4a8() -> bool:
    """Return whether vLLM makes W4A8 of W4A16 on this CPU."""
    return has_zentorch() or torch.cpu._is_amx_tile_supported()


def prepare_pass(layers: list[nn.Module], x: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs ``x`` through every layer and returns the seconds it took.

    Raises NoKernelError if the layers do not run.
    """

    def run() -> None:
        for layer in layers:
            layer(x)

    try:
        run()
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as e:
        raise NoKernelError(f"it does not run: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
    return timed_pass(layers, x)


def kernel_name(layer: nn.Module) -> str:
    """Return the class of the kernel that vLLM chose, or of its method for 16-bit weights."""
    if chosen := getattr(layer.quant_method, "kernel_name", None):
        return str(chosen)
    attributes = vars(layer.scheme).values() if hasattr(layer, "scheme") else ()
    names = [type(value).__name__ for value in attributes]
    return next((name for name in names if name.endswith("Kernel")), type(layer.quant_method).__name__)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def vllm_config() -> Any:
    """Return a configuration for a 16-bit Llama; vLLM's layers read its dtype."""
    from vllm.config import ModelConfig, VllmConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES["tiny"].config()))
        return VllmConfig(model_config=ModelConfig(folder, dtype="bfloat16", skip_tokenizer_init=True))


def prepare_process() -> None:
    """Set up what vLLM's layers expect of a worker: a tensor-parallel group, here of one."""
    from vllm.config import set_current_vllm_config

    from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels

    provide_cpu_kernels()
    with set_current_vllm_config(vllm_config()):
        have_ranks()


def measure_kernels(
    model: Model,
    results: Results,
    *,
    layers: Sequence[str],
    tokens: Sequence[int],
    schemes: Sequence[str],
    seconds: float,
    logs: Path,
    deadline: float,
    timeout: float,
) -> int:
    """Measure what is missing, ``seconds`` a cell; return how many cells are left because time ran out."""
    shapes = model.shape.fused_projections()
    cells: list[dict[str, Any]] = [
        {
            "model": model.name,
            "layer": layer,
            "outputs": shapes[layer][0],
            "inputs": shapes[layer][1],
            "tokens": count,
            "schemes": list(schemes),
        }
        for layer in layers
        for count in tokens
    ]
    missing = [cell for cell in cells if results.find(KERNELS, cell) is None]
    print(f"kernels: {len(cells) - len(missing)} of {len(cells)} cells are there already", flush=True)
    # As many threads as vLLM serves with on a CPU: it leaves one core to its front end.
    threads = str(max(1, (os.cpu_count() or 1) - 1))
    worker = Worker("benchmarks.speed.kernels", logs / "kernels.log", {"OMP_NUM_THREADS": threads})
    try:
        for done, cell in enumerate(missing):
            if time.monotonic() > deadline:
                return len(missing) - done
            print(
                f"[{done + 1}/{len(missing)}] {cell['layer']}, {cell['tokens']} tokens: ", end="", flush=True
            )
            started = time.monotonic()
            try:
                result = worker.call({**cell, "seconds": seconds}, timeout)
            except WorkerError as e:
                results.save(KERNELS, cell, time.monotonic() - started, failure=str(e))
                print(f"failed: {e}", flush=True)
                continue
            results.save(KERNELS, cell, time.monotonic() - started, result=result)
            print(", ".join(f"{scheme} {_text(found)}" for scheme, found in result.items()), flush=True)
    finally:
        worker.close()
    return 0


def _text(found: dict[str, Any]) -> str:
    return "no kernel" if "unavailable" in found else f"{found['microseconds']:.1f} us"


if __name__ == "__main__":
    prepare_process()
    answer_requests(measure)
