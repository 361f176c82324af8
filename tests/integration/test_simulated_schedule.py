# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The simulator's passes against those of vLLM's own scheduler, without an engine."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexquant.planning.arrivals import make_trace
from flexquant.planning.device import builtin_devices, load_device
from flexquant.planning.scheduler import Batch, Limits, Scheduler, Sequence
from flexquant.planning.server import Machine, server_limits
from flexquant.planning.trace import Request
from tests.checkpoints import make_checkpoint

Schedule = list[dict[int, int]]
"""For every pass: request -> the number of its tokens."""

LIMITS = {
    "plain": Limits(8192, 64),
    "chunked": Limits(100, 64),
    "few sequences": Limits(256, 5),
    "little KV cache": Limits(256, 64, kv_cache_tokens=480),
    "little of all": Limits(48, 7, kv_cache_tokens=400),
}
EVERY = 3
"""Passes between one request and the next; the first requests come together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_checkpoint(folder, scheme=None)
    return folder


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("name", LIMITS)
def test_passes_are_those_of_vllm(model: Path, name: str, async_scheduling: bool) -> None:
    trace = make_trace(40, 1, 1, 90, 40, 0.9, seed=3)
    limits = replace(LIMITS[name], async_scheduling=async_scheduling)
    ours, preemptions = simulated_schedule(trace, limits)
    assert ours == vllm_schedule(trace, limits, model)
    assert (preemptions > 0) == (limits.kv_cache_tokens is not None)


def test_default_limits_are_those_of_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own rules say so, once told the names and memory of the shipped devices."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    def of_vllm(devices: int) -> tuple[int, int]:
        tokens, sequences = EngineArgs.get_batch_defaults(devices)
        return tokens[UsageContext.OPENAI_API_SERVER], sequences[UsageContext.OPENAI_API_SERVER]

    def simulated(machine: Machine) -> tuple[int, int]:
        limits = server_limits(machine)
        return limits.max_num_batched_tokens, limits.max_num_seqs

    if current_platform.is_cpu():
        for devices in (1, 2):
            assert simulated(Machine(devices=devices)) == of_vllm(devices)
    platform = type(current_platform)
    machines = [Machine.of_device(load_device(name)) for name in builtin_devices()]
    gpus = [machine for machine in machines if machine.gpu is not None]
    assert len(gpus) > 9
    for gpu in gpus:
        memory, family = int(gpu.gpu_memory_bytes), 100 if "B200" in gpu.gpu else 90
        with monkeypatch.context() as patch:
            patch.setattr(platform, "is_device_capability_family", lambda _, asked, own=family: asked == own)
            assert server_limits(gpu).capture_sizes == vllm_capture_sizes(server_limits(gpu), model), gpu
            patch.setattr(platform, "is_cpu", lambda _: False)
            patch.setattr(platform, "get_device_name", lambda *_, name=gpu.gpu: name)
            patch.setattr(platform, "get_device_total_memory", lambda *_, size=memory: size)
            assert simulated(gpu) == of_vllm(1), gpu


def arriving(trace: list[Request], number: int) -> range:
    """Return the requests that come before a pass."""
    first = 0 if number == 0 else 10 + number // EVERY - 1
    last = 10 + number // EVERY if number % EVERY == 0 else first
    return range(first, min(last, len(trace)))


def simulated_schedule(trace: list[Request], limits: Limits) -> tuple[Schedule, int]:
    scheduler = Scheduler(limits)
    sequences = [Sequence(request) for request in trace]
    numbers = {id(sequence): i for i, sequence in enumerate(sequences)}
    in_flight: deque[Batch] = deque()
    schedule: Schedule = []
    while True:
        batch = None
        if len(in_flight) < limits.passes_in_flight:
            scheduler.waiting.extend(sequences[i] for i in arriving(trace, len(schedule)))
            batch = scheduler.schedule()
            schedule.append({numbers[id(chunk.sequence)]: chunk.tokens for chunk in batch})
        if batch:
            in_flight.append(batch)
        elif in_flight:
            scheduler.complete(in_flight.popleft())
        else:
            return schedule, sum(s.preemptions for s in sequences)


def vllm_schedule(trace: list[Request], limits: Limits, model: Path) -> Schedule:
    """Return vLLM's schedule, in the order of ``EngineCore.step`` and ``step_with_batch_queue``."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as VllmRequest

    scheduler = vllm_scheduler(limits, model)
    requests = [
        VllmRequest(
            request_id=str(i),
            prompt_token_ids=[1] * request.input,
            sampling_params=SamplingParams(max_tokens=request.output, ignore_eos=True),
            pooling_params=None,
        )
        for i, request in enumerate(trace)
    ]
    in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
    schedule: Schedule = []
    while True:
        output = None
        if len(in_flight) < limits.passes_in_flight:
            for i in arriving(trace, len(schedule)):
                scheduler.add_request(requests[i])
            output = scheduler.schedule()
            schedule.append({int(name): tokens for name, tokens in output.num_scheduled_tokens.items()})
        if output and output.num_scheduled_tokens:
            names = list(output.num_scheduled_tokens)
            sampled = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[] if requests[int(name)].is_prefill_chunk else [2] for name in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            in_flight.append((output, sampled))
        elif in_flight:
            scheduler.update_from_output(*in_flight.popleft())
        else:
            return schedule


def vllm_config(limits: Limits, model: Path) -> Any:
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

    cache = CacheConfig(block_size=limits.block_size, enable_prefix_caching=False)
    # One block more, since vLLM keeps its first one for padding.
    cache.num_gpu_blocks = 10_000 if limits.kv_cache_tokens is None else int(limits.blocks) + 1
    return VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="bfloat16", max_model_len=1024),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=1024,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=limits.async_scheduling,
        ),
    )


def vllm_scheduler(limits: Limits, model: Path) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = vllm_config(limits, model)
    spec = FullAttentionSpec(block_size=limits.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = config.cache_config.num_gpu_blocks
    return (AsyncScheduler if limits.async_scheduling else VllmScheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=limits.block_size,
    )


def vllm_capture_sizes(limits: Limits, model: Path) -> tuple[int, ...]:
    """Return the sizes that vLLM computes when the CPU platform does not take the graphs out."""
    from vllm.config import CUDAGraphMode

    config = vllm_config(limits, model)
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = compilation.max_cudagraph_capture_size = None
    config._set_cudagraph_sizes()
    return tuple(compilation.cudagraph_capture_sizes)
