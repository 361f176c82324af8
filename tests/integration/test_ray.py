# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ray as vLLM's executor: its actors get the policy and the variants as processes of vLLM's own do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from vllm.platforms import current_platform

from tests.integration.two_ranks import needs_two_cores, run_several

ray = pytest.importorskip("ray", reason="`make test-full` installs it")

pytestmark = [*needs_two_cores, pytest.mark.full]
RANKS = {"tensor_parallel_size": 2}


def offer_cores() -> None:
    """Have vLLM take what Ray calls GPUs for its CPU platform's devices, for which Ray has no name.

    vLLM refuses Ray on CPUs only for lack of that name. Delete when its CPU platform has a
    ``ray_device_key``.
    """
    from vllm.platforms.cpu import CpuPlatform

    assert not CpuPlatform.ray_device_key
    CpuPlatform.ray_device_key = "GPU"


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = {"worker_process_setup_hook": offer_cores, "env_vars": paths}
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, runtime_env=workers)
    yield
    ray.shutdown()


def test_both_ranks_take_the_policys_routes_and_answer_as_processes_do(tiny_merged, two_devices, tmp_path):
    folder = tiny_merged(num_layers=2) / "merged"
    actors, processes = (
        run_several(folder, RANKS, work, executor)
        for executor in ("ray", "mp")
        if not (work := tmp_path / executor).mkdir()
    )
    actors.check_routes()
    assert actors.answers == processes.answers
