# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""FlashInfer's metadata builder, the default on data-centre Blackwell GPUs, tells all phases; on a CPU."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from flexquant.serving.worker.forward_pass import Pass
from tests.integration.test_phases import HEADS, Observed, make_vllm_config

pytest.importorskip("flashinfer", reason="`make test-full` runs it in a process of its own")

pytestmark = pytest.mark.full


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch, tmp_path) -> VllmConfig:
    """Return vLLM's configuration, on a platform that says of itself what a B200 does.

    There FlashInfer's kernels come compiled (``VLLM_HAS_FLASHINFER_CUBIN``, which vLLM reads once), and take
    what the builder makes as it is. On Hopper it would compile a kernel first, for which a GPU is needed.
    """
    config = make_vllm_config(tmp_path)
    config.cache_config.kv_cache_layout = "LBHNC"
    capability = classmethod(lambda cls, device_id=0: DeviceCapability(10, 0))
    monkeypatch.setattr(type(current_platform), "get_device_capability", capability)
    return config


@pytest.fixture
def observed(blackwell: VllmConfig) -> Observed:
    from vllm.v1.attention.backends.flashinfer import FlashInferImpl

    def implement() -> FlashInferImpl:
        return FlashInferImpl(HEADS, 32, 1.0, 2, None, None, "auto")

    return Observed(blackwell, "FLASHINFER", implement)


def test_all_phases_are_told(observed: Observed) -> None:
    from vllm.v1.attention.backends.flashinfer import FlashInferMetadata

    for query_lengths, phase in [([1, 1], "decode"), ([7, 5], "prefill"), ([1, 7], "mixed")]:
        step = observed.step(query_lengths)
        assert all(isinstance(metadata, FlashInferMetadata) for metadata in step.attn_metadata.values())
        found = observed.observer.read(step, 16)
        assert found == Pass(phase, 16, 2, max(query_lengths), sum(query_lengths))


def test_a_step_for_which_the_model_is_not_called_was_replayed(observed: Observed) -> None:
    observed.observer.read(observed.step([5, 5]), 16)
    observed.step([1, 1])
    observed.observer.settle()
    assert observed.replayed == [Pass("decode", 2, 2, 1, 2)]
