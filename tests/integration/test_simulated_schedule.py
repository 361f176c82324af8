# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Replays of the simulator against the same with vLLM's own scheduler in the place of FlexQuant's copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.arrivals import make_trace
from flexquant.planning import replaying
from flexquant.planning.device import builtin_devices, load_device
from flexquant.planning.replaying import Replay
from flexquant.planning.scheduler import Chunk, Sequence
from flexquant.planning.server import Limits, Machine, server_limits
from tests.checkpoints import make_checkpoint
from tests.pass_times import make_times, run_trace

LIMITS = {
    "plain": Limits(8192, 64),
    "chunked": Limits(100, 64),
    "few sequences": Limits(256, 5),
    "little KV cache": Limits(256, 64, kv_cache_tokens=480),
    "little of all": Limits(48, 7, kv_cache_tokens=400),
}
TIMES = make_times({"w8a8": ({1: 0.010, 64: 0.020}, {16: 0.010, 1024: 0.050})}, 64, 1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_checkpoint(folder, scheme=None)
    return folder


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("name", LIMITS)
def test_passes_are_those_of_vllm(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, async_scheduling: bool
) -> None:
    trace = make_trace(40, 20, 0.5, 90, 40, 0.9, seed=3)
    limits = replace(LIMITS[name], async_scheduling=async_scheduling)
    ours = run_trace(trace, limits, times=TIMES)
    assert any(s.preemptions for s in ours.sequences) == (limits.kv_cache_tokens is not None)
    monkeypatch.setattr(replaying, "Scheduler", lambda limits: SchedulerOfVllm(limits, model))
    assert everything(ours) == everything(run_trace(trace, limits, times=TIMES))


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


def everything(replay: Replay) -> tuple[Any, ...]:
    served = [(s.first_token, s.last_token, s.generated, s.preemptions) for s in replay.sequences]
    return replay.passes, replay.gaps, served


class BatchOfVllm(list[Chunk]):
    """A pass, with what vLLM's scheduler said of it."""

    output: Any


class SchedulerOfVllm:
    """vLLM's scheduler with the methods of FlexQuant's copy."""

    def __init__(self, limits: Limits, model: Path) -> None:
        self.scheduler = vllm_scheduler(limits, model)
        self.served: dict[str, tuple[Sequence, Any]] = {}
        self.waiting = self
        """The place to which a replay appends requests that arrive."""

    def append(self, sequence: Sequence) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        request = VllmRequest(
            request_id=str(len(self.served)),
            prompt_token_ids=[1] * sequence.request.input,
            sampling_params=SamplingParams(max_tokens=sequence.request.output, ignore_eos=True),
            pooling_params=None,
        )
        self.served[request.request_id] = sequence, request
        self.scheduler.add_request(request)

    def schedule(self) -> BatchOfVllm:
        output = self.scheduler.schedule()
        batch = BatchOfVllm()
        batch.output = output
        for name, tokens in output.num_scheduled_tokens.items():
            sequence, request = self.served[name]
            context = request.num_computed_tokens - tokens
            batch.append(Chunk(sequence, tokens, context, not request.is_prefill_chunk))
        return batch

    def complete(self, batch: BatchOfVllm) -> list[Sequence]:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(batch.output.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[2] if chunk.yields else [] for chunk in batch],
        )
        self.scheduler.update_from_output(batch.output, sampled)
        for sequence, request in self.served.values():
            sequence.generated, sequence.preemptions = request.num_output_tokens, request.num_preemptions
        return [chunk.sequence for chunk in batch if chunk.yields]


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
