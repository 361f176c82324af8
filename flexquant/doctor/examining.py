# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do what ``vllm serve`` does before it loads weights; report findings, and count what plans would take.

vLLM makes the configuration from the same arguments, and FlexQuant's model is built on the meta device, where
tensors have no memory. So anything that would refuse to serve refuses here too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.draft_heads import check_draft_heads
from flexquant.checkpoint.loadable import check_loadable
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import QUANT_METHOD, SHARED
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import describe_kv
from flexquant.doctor import Finding
from flexquant.errors import FlexQuantError, said_by
from flexquant.evaluation.engine import describe_machine, describe_versions, environment
from flexquant.policy.pass_times import device_name
from flexquant.policy.plans import Layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from flexquant.serving.worker.model import FlexQuantForCausalLM


def examine(folder: str, arguments: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about serving ``folder`` with these arguments, up to the first problem at the start."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    here = {"machine": describe_machine(), "versions": describe_versions()}
    said = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    yield Finding("ok", "machine", f"{device_name(here)}; {said}", here)
    try:
        checkpoint = MergedCheckpoint.open(folder, published=True)
        merged = checkpoint.merged
        yield Finding("ok", "checkpoint", f"{merged.base_architecture} as {', '.join(merged.variants)}")
        if not merged.may_share_cache(merged.variants):
            yield Finding("note", "KV cache", describe_kv(merged.kv_compatibility))
        for name, variant in merged.variants.items():
            tensors = checkpoint.variant_tensors(name)
            check_draft_heads(checkpoint.source_config(name), tensors, f"variant '{name}'")
            check_loadable(variant.quantization_config, tensors, f"variant '{name}'")
        yield from _examine_with_vllm(folder, arguments)
    except (Exception, SystemExit) as e:  # anything that stops vllm serve is a finding
        text = str(e) if isinstance(e, FlexQuantError) else f"{type(e).__name__}: {said_by(e)}"
        yield Finding("problem", "refused", text)


def _examine_with_vllm(folder: str, arguments: Sequence[str]) -> Iterator[Finding]:
    from vllm.platforms import current_platform

    from flexquant.doctor.built_model import attention_layers, examine_memory, find_kernels
    from flexquant.serving.kernels.choice import zentorch_problem

    vllm_config = engine_config(folder, arguments)
    parallel = vllm_config.parallel_config
    if (ranks := parallel.world_size_across_dp) > 1:
        text = f"one of {ranks} is examined, as on this machine; how they reach each other is not"
        yield Finding("ok", "ranks", text, {"ranks": ranks})
        if parallel.enable_expert_parallel:  # vLLM computes a rank's experts from tensors' values
            text = "with --enable-expert-parallel, neither kernels nor memory can be examined without a start"
            yield Finding("note", "experts", text)
            return
    if current_platform.is_cpu() and (problem := cores_problem()):
        yield Finding("note", "cores", problem)
    if current_platform.is_cpu() and (problem := zentorch_problem()):
        yield Finding("note", "zentorch", problem)
    with built_without_weights(vllm_config) as model:
        plans = [plan.name for plan in model.routes.plans]
        yield Finding("ok", "policy", f"{model.policy.name}: plans {', '.join(plans)}", {"plans": plans})
        backends = {layer.get_attn_backend().get_name(): None for layer in attention_layers(vllm_config)}
        text = f"backend {', '.join(backends)}"
        yield Finding("ok", "attention", text, {"backends": list(backends)})
        yield _graphs(vllm_config, model)
        compiles = current_platform.is_cpu() and vllm_config.compilation_config.backend == "inductor"
        if compiles and vllm_config.compilation_config.mode and (problem := compiler_problem()):
            advice = "install g++ and Python's header files, or serve with --enforce-eager"
            yield Finding("problem", "compiler", f"torch.compile needs one, and {problem}; {advice}")
        for name, variant in model.variants.items():
            yield from find_kernels(name, variant)
        yield from examine_memory(vllm_config, dict(model.variants.items()), model.routes)


def cores_problem() -> str | None:
    """Return what it means that the environment gives the model all cores; None if it leaves one."""
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if not re.fullmatch(r"\d+(-\d+)?([,|]\d+(-\d+)?)*", bound):  # auto, nobind
        return None
    parts = (part.partition("-") for part in re.split(r"[,|]", bound))
    cores = {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
    if not cores.issuperset(os.sched_getaffinity(0)):
        return None
    why = "leaves no core to vLLM's front end; two cores, both bound, took 0.5 to 0.8 of one core's time for "
    why += "prompts, and up to 1.3 times as long for a small model's next tokens"
    return f"VLLM_CPU_OMP_THREADS_BIND={bound} {why}; if answers matter more, leave one out"


def compiler_problem() -> str | None:
    """Return why what torch.compile writes for a CPU cannot be compiled here; None if it can."""
    compiler, headers = os.environ.get("CXX", "g++"), "#include <omp.h>\n#include <Python.h>\n"
    command = [compiler, "-x", "c++", "-fsyntax-only", f"-I{sysconfig.get_path('include')}", "-"]
    try:
        done = subprocess.run(command, input=headers, capture_output=True, text=True)
    except OSError as e:
        return f"'{compiler}' does not run ({e.strerror})"
    return f"'{compiler}' fails ({done.stderr.strip().partition(chr(10))[0]})" if done.returncode else None


def engine_config(folder: str, arguments: Sequence[str]) -> VllmConfig:
    """Return the configuration that ``vllm serve`` makes; raise FlexQuantError for an unknown argument."""
    from vllm import EngineArgs

    from flexquant.serving.vllm_api import FlexibleArgumentParser, UsageContext

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve", exit_on_error=False))
    args, unknown = parser.parse_known_args(["--model", folder, "--config-format", QUANT_METHOD, *arguments])
    if unknown:
        problem = f"'{' '.join(unknown)}' is no argument of vLLM's engine"
        raise FlexQuantError(f"{problem}; leave out what is for the API server, such as --port")
    return EngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


@contextmanager
def built_without_weights(vllm_config: VllmConfig) -> Iterator[FlexQuantForCausalLM]:
    """Yield the model as the first rank builds it, on the meta device.

    Process groups hold this rank alone, and report all. vLLM's cache of rotary embeddings stays as it was.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
    from flexquant.serving.vllm_api import (
        _ROPE_DICT,
        cleanup_dist_env_and_memory,
        get_dp_group,
        get_pp_group,
        get_tp_group,
        init_distributed_environment,
        initialize_model,
        initialize_model_parallel,
        set_current_vllm_config,
        set_default_torch_dtype,
    )

    class ReadAsZeros(TorchFunctionMode):
        """Has the few classes that read a tensor while they are built read zeros."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.cpu and args[0].is_meta:
                return torch.zeros_like(args[0], device="cpu")
            return func(*args, **(kwargs or {}))

    provide_cpu_kernels()
    parallel, kept = vllm_config.parallel_config, dict(_ROPE_DICT)
    alone = copy(vllm_config)
    alone.parallel_config = copy(parallel)
    vars(alone.parallel_config).update(data_parallel_size=1, nnodes=1, enable_elastic_ep=False)
    _ROPE_DICT.clear()
    with tempfile.TemporaryDirectory() as store, set_current_vllm_config(vllm_config):
        try:
            with set_current_vllm_config(alone):
                init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
                initialize_model_parallel(tensor_model_parallel_size=1)
            for group, size in (
                (get_tp_group(), parallel.tensor_parallel_size),
                (get_pp_group(), parallel.pipeline_parallel_size),
                (get_dp_group(), parallel.data_parallel_size),
            ):
                group.world_size, group.ranks = size, list(range(size))
            dtype = vllm_config.model_config.dtype
            assert isinstance(dtype, torch.dtype)
            with set_default_torch_dtype(dtype), torch.device("meta"), ReadAsZeros():
                model = initialize_model(vllm_config)
            yield model
        finally:
            _ROPE_DICT.clear()
            _ROPE_DICT.update(kept)
            cleanup_dist_env_and_memory()


def _graphs(vllm_config: VllmConfig, model: FlexQuantForCausalLM) -> Finding:
    """Count the CUDA graphs to capture: piecewise one per size and plan, of whole passes one per size."""
    compilation = vllm_config.compilation_config
    mode, sizes = compilation.cudagraph_mode, compilation.cudagraph_capture_sizes or []
    if not mode or not sizes:
        return Finding("ok", "graphs", "no CUDA graphs: by --enforce-eager, or the device has none")
    in_pieces = sizes if mode.has_piecewise_cudagraphs() else []
    pieces = sum(len(model.routes.reachable(size)) for size in in_pieces)
    whole = len(sizes) if mode.has_full_cudagraphs() else 0
    text = f"{mode.name}, {len(sizes)} sizes of {min(sizes)} to {max(sizes)} tokens: {pieces} captures in "
    text += f"pieces (sizes x plans) and up to {whole} of whole passes; their memory is logged at the start"
    details = {"mode": mode.name, "sizes": sizes, "pieces": pieces, "whole": whole}
    return Finding("ok", "graphs", text, details)


@dataclass(frozen=True)
class LoadedBytes:
    """The bytes of one rank's weights, counted as `flexquant doctor` does."""

    by_layer: Mapping[str, Mapping[int | None, int]]
    """Variant or SHARED -> decoder layer, or None for what lies outside of layers -> bytes."""
    written: Mapping[str, int]
    """Variant that computes its weights -> bytes that it writes them to; all write to the same memory."""
    sources: Mapping[str, str]
    """Variant that computes its weights, nested or not -> the variant that it computes them from."""
    weights: int
    """Number of weights in the decoder layers."""
    cache_tokens: Callable[[int], int]
    """Returns the tokens of the KV cache that a server has beside so many bytes of weights."""
    request_bytes: Callable[[int], int]
    """Returns the bytes that a request of so many tokens takes in the KV cache."""

    def of(self, plans: Iterable[Layers]) -> int:
        """Return the bytes of a policy with these plans."""
        return sum(self._loaded(plans).values())

    def bits(self, plans: Iterable[Layers]) -> float:
        """Return the bits that a weight of the decoder layers takes, scales included."""
        inside = (size for (_, layer), size in self._loaded(plans).items() if layer is not None)
        return 8 * sum(inside) / self.weights

    def most_beside(self, tokens: int) -> int:
        """Return the most bytes of weights beside ``tokens`` of cache; raise FlexQuantError if none fit."""
        if self.cache_tokens(0) < tokens:
            there = f"a KV cache of {self.cache_tokens(0):,} tokens without any weights"
            problem = f"there is memory for {there}, and {tokens:,} are asked for"
            raise FlexQuantError(f"{problem}; give fewer --kv-tokens, or more --tensor-parallel-size")
        weights = sum(sum(sizes.values()) for sizes in self.by_layer.values())
        sizes = range(1 + weights + max(self.written.values(), default=0))
        return bisect_left(sizes, True, key=lambda nbytes: self.cache_tokens(nbytes) < tokens) - 1

    def _loaded(self, plans: Iterable[Layers]) -> dict[tuple[str, int | None], int]:
        used = {(variant, layer) for plan in plans for layer, variant in enumerate(plan)}
        used |= {(self.sources[variant], layer) for variant, layer in used if variant in self.sources}
        places = {*used, *((variant, None) for variant, _ in used)}
        once = {(SHARED, layer): size for layer, size in self.by_layer[SHARED].items()}
        once["", None] = max((self.written.get(variant, 0) for variant, _ in used), default=0)
        return {(v, layer): self.by_layer[v].get(layer, 0) for v, layer in places} | once


def count_bytes(folder: Path, policy: JsonObject, devices: int) -> LoadedBytes:
    """Count for a policy that takes all layers of its variants; raise FlexQuantError if it is not served."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as work, environment(VLLM_LOGGING_LEVEL=level):
        file = Path(work, "policy.json")
        file.write_text(json.dumps(policy), encoding="utf-8")
        options = json.dumps({"flexquant": {"policy": str(file)}})
        arguments = ["--additional-config", options, "--tensor-parallel-size", str(devices)]
        vllm_config = engine_config(str(folder), arguments)
        from flexquant.doctor.built_model import asked_for_cache, cache_sizes, memory_of_weights
        from flexquant.serving.worker.weight_memory import weights_of_layers

        with built_without_weights(vllm_config) as model:
            variants, routes = dict(model.variants.items()), model.routes
            memory, (per_token, states) = memory_of_weights(variants), cache_sizes(vllm_config)
            with_states = per_token + states // vllm_config.model_config.max_model_len
            return LoadedBytes(
                memory.nbytes_by_layer(),
                memory.written,
                {v: routes.source(v) for v in variants if not routes.has_weights(v)} | {**routes.nested},
                max(map(weights_of_layers, variants.values())),
                lambda nbytes: max(0, asked_for_cache(vllm_config, nbytes)) // with_states,
                lambda tokens: tokens * per_token + states,
            )
