# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The client of the speed benchmarks, which stays for hundreds of calls, keeps nothing of them."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest

from benchmarks.speed.bench_client import bench
from benchmarks.speed.workloads import Workload
from tests.checkpoints import make_checkpoint


def test_a_call_leaves_nothing_that_is_never_collected(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path / "model", scheme=None))
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        arguments = Workload.parse("1x8+4").bench_arguments(url, model, model, 0)
        with pytest.raises(ValueError, match="Initial test run failed"):
            bench([*arguments, "--ready-check-timeout-sec", "1"])
    assert gc.get_freeze_count() == 0
