# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a pass holds, read where vLLM's attention metadata builders are told of it: those of many devices."""

import json
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.speed.shapes import SHAPES
from flexquant.errors import FlexQuantError
from flexquant.serving.worker.forward_pass import Pass, PassObserver, PassState, describe_pass

HEADS = 4
NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
BACKENDS = [
    *("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", "B12X", "ROCM_ATTN"),
    *("ROCM_AITER_UNIFIED_ATTN", "CPU_ATTN"),
]
"""Attention backends whose builders need nothing that only their device has."""
missing = pytest.mark.skipif(find_spec("flashinfer") is None, reason="`make test-full` runs it by itself")
FLASHINFER = pytest.param("FLASHINFER", marks=[pytest.mark.full, missing])
"""The default on data-centre Blackwell GPUs."""


def starts_of(query_lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(query_lengths)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("query_lengths", "tokens_per_sequence", "phase"),
    [
        ([1], 1, "decode"),
        ([1, 1, 1], 1, "decode"),
        ([7], 1, "prefill"),
        ([2, 64, 3], 1, "prefill"),
        ([1, 7], 1, "mixed"),
        ([7, 5, 1], 1, "mixed"),
        # Three tokens are speculated; a sequence may have fewer.
        ([4, 4], 4, "decode"),
        ([4, 2], 4, "decode"),
        ([5, 64], 4, "prefill"),
        ([64, 4], 4, "mixed"),
    ],
)
@pytest.mark.parametrize("padding", [[], [0, 0]], ids=["", "padded"])
def test_phases(query_lengths: list[int], tokens_per_sequence: int, phase: str, padding: list[int]) -> None:
    longest = max(query_lengths)
    found = describe_pass(starts_of(query_lengths + padding), longest, 96, tokens_per_sequence)
    assert found == Pass(phase, 96, len(query_lengths), longest, sum(query_lengths))


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Return vLLM's configuration of a small model."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"].config()))
    cache = CacheConfig(block_size=16)
    cache.num_gpu_blocks = 64
    model = ModelConfig(str(folder), dtype="bfloat16", skip_tokenizer_init=True)
    return VllmConfig(model_config=model, cache_config=cache)


def context_of(metadata: Any) -> ForwardContext:
    return ForwardContext(no_compile_layers={}, attn_metadata=metadata, slot_mapping={})


class Observed:
    """Two attention layers of a backend, observed, and the builder that vLLM would make for them."""

    def __init__(self, vllm_config: VllmConfig, backend: str = "CPU_ATTN") -> None:
        self.replayed: list[Pass] = []
        self.observer = PassObserver(1, replayed=self.replayed.append)
        layers = vllm_config.compilation_config.static_forward_context
        layers.clear()
        with set_current_vllm_config(vllm_config):
            for name in NAMES:
                own = {"num_kv_heads": 2, "prefix": name, "cache_config": vllm_config.cache_config}
                layer = Attention(HEADS, 32, 1.0, **own)
                layer.attn_backend = AttentionBackendEnum[backend].get_class()
                if backend == "FLASHINFER":  # whose builder asks what a layer computes with
                    from vllm.v1.attention.backends.flashinfer import FlashInferImpl

                    layer.impl = FlashInferImpl(HEADS, 32, 1.0, 2, None, None, "auto")
            self.observer.observe(layers)
            backends = {layers[name].get_attn_backend() for name in NAMES}
            (self.backend,) = backends  # otherwise vLLM would build the metadata twice
            spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
            self.builder = self.backend.get_builder_cls()(spec, NAMES, vllm_config, torch.device("cpu"))

    def step(self, query_lengths: list[int], capture: bool = False) -> ForwardContext:
        """Build the metadata of a step: each sequence has 20 tokens already; several more are a prompt's."""
        starts, lengths = starts_of(query_lengths), torch.tensor(query_lengths, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=20 + lengths,
            num_reqs=len(query_lengths),
            num_actual_tokens=sum(query_lengths),
            max_query_len=max(query_lengths),
            max_seq_len=20 + max(query_lengths),
            block_table_tensor=torch.zeros(len(query_lengths), 8, dtype=torch.int32),
            slot_mapping=torch.arange(sum(query_lengths)),
            is_prefilling=lengths > 1,
            seq_lens_cpu_upper_bound=20 + lengths,
        )
        if capture:
            metadata = self.builder.build_for_cudagraph_capture(common)
        else:
            metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
        return context_of(dict.fromkeys(NAMES, metadata))


@pytest.fixture
def b200(backend: str, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give FlashInfer a platform that says of itself what a B200 does.

    There its kernels come compiled (``VLLM_HAS_FLASHINFER_CUBIN``, which vLLM reads once), and take what the
    builder makes as it is. On Hopper it would compile a kernel first, for which a GPU is needed.
    """
    if backend == "FLASHINFER":
        monkeypatch.setattr(vllm_config.cache_config, "kv_cache_layout", "LBHNC")
        capability = classmethod(lambda cls, device_id=0: DeviceCapability(10, 0))
        monkeypatch.setattr(type(current_platform), "get_device_capability", capability)


@pytest.mark.usefixtures("b200")
@pytest.mark.parametrize("backend", [*BACKENDS, FLASHINFER])
def test_every_backend_tells_all_phases(backend: str, vllm_config: VllmConfig) -> None:
    observed = Observed(vllm_config, backend)
    assert observed.backend.get_name() == AttentionBackendEnum[backend].get_class().get_name()
    for query_lengths, phase in [([1, 1], "decode"), ([7, 5], "prefill"), ([1, 7], "mixed")]:
        found = observed.observer.read(observed.step(query_lengths), 16)
        assert found == Pass(phase, 16, 2, max(query_lengths), sum(query_lengths))
    assert observed.replayed == []
    observed.step([1, 1])
    observed.observer.settle()
    assert observed.replayed == [Pass("decode", 2, 2, 1, 2)]


def test_a_step_for_which_the_model_is_not_called_was_replayed(vllm_config: VllmConfig) -> None:
    observed = Observed(vllm_config)
    observed.observer.read(observed.step([5, 5, 5]), 16)
    observed.step([1, 1, 1])
    observed.observer.settle()
    assert observed.replayed == [Pass("decode", 3, 3, 1, 3)]
    observed.observer.settle()
    observed.step([1, 1])
    called = observed.step([5])
    assert observed.replayed[1:] == [Pass("decode", 2, 2, 1, 2)]
    observed.observer.read(called, 8)
    observed.observer.settle()
    assert len(observed.replayed) == 2


def test_passes_before_the_first_prompt_and_captures_are_vllms_own(vllm_config: VllmConfig) -> None:
    observed = Observed(vllm_config)
    for capture in (True, False):
        own = observed.step([1, 1], capture=capture)
        observed.observer.settle()
        assert observed.observer.read(own, 2) == Pass("decode", 2, 2, 1, 2)
        assert observed.observer.state == PassState.WARM_UP
    observed.observer.read(observed.step([5]), 8)
    assert observed.observer.state == PassState.SCHEDULED
    observed.step([1, 1], capture=True)
    observed.observer.settle()
    assert observed.replayed == []


def test_whose_pass_it_is_after_serving_has_begun(vllm_config: VllmConfig) -> None:
    observed = Observed(vllm_config)
    observer = observed.observer

    def state(query_lengths: list[int], **options: Any) -> PassState:
        observer.read(observed.step(query_lengths, **options), sum(query_lengths))
        return observer.state

    observer.next_is_own = True
    assert state([5]) == PassState.WARM_UP, "a prompt of vLLM's own"
    observer.next_is_own = False
    assert [state([5]), state([1])] == [PassState.SCHEDULED] * 2
    observer.next_is_own = True
    assert [state([5]), state([1])] == [PassState.IN_STEP] * 2
    observer.next_is_own = False
    assert state([1], capture=True) == PassState.IN_STEP
    with observer.capturing():
        assert state([1, 1]) == state([5]) == PassState.CAPTURE, "even if waiting requests describe it"
    assert state([1, 1, 1]) == PassState.SCHEDULED
    assert observed.replayed == []


def test_profiling_runs_have_no_pass(vllm_config: VllmConfig) -> None:
    assert Observed(vllm_config).observer.read(context_of(None), 8) is None


class Unknown:
    """A layer of another kind, such as vLLM may register one day."""


def test_a_layer_without_a_backend_is_refused_where_the_phase_matters() -> None:
    observer = PassObserver(1)
    observer.check_phases()
    observer.observe({"model.layers.0.mixer": Unknown()})
    with pytest.raises(FlexQuantError, match=r"layer 'model.layers.0.mixer' \(Unknown\).*names? no phase"):
        observer.check_phases()
    assert observer.read(context_of({"x": Unknown()}), 8) == Pass("prefill", 8, 0, 0, 0)
