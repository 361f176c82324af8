# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One model on two machines, as vLLM starts it: a command on each, which reads the files of its own machine.

Both machines are this one: two commands in two folders, which meet at the loopback interface.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from examples.vllm_server import ServerError, VLLMServer, default_environment, free_port
from flexquant.policy.rules import load_policy
from tests.integration.live_server import complete
from tests.integration.two_ranks import CORES, needs_two_cores

pytestmark = [*needs_two_cores, pytest.mark.full]
START_SECONDS = 300


@contextmanager
def two_nodes(merged: Path, work: Path, policies: list[str]) -> Iterator[VLLMServer]:
    """Serve ``merged`` tensor parallel on two nodes, each with its policy; yield the first, as it starts."""
    meeting = ["--tensor-parallel-size", "2", "--nnodes", "2"]
    meeting += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    nodes: list[VLLMServer] = []
    try:
        for rank, policy in enumerate(policies):
            file = work / f"node{rank}.yaml"
            file.write_text(json.dumps(load_policy(policy).document))
            environment = default_environment() | {
                "GLOO_SOCKET_IFNAME": "lo",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_CPU_OMP_THREADS_BIND": str(CORES[rank]),
            }
            arguments = [*meeting, "--node-rank", str(rank), "--enforce-eager", "--max-model-len", "256"]
            arguments += ["--additional-config", json.dumps({"flexquant": {"policy": str(file)}})]
            arguments += ["--headless"] if rank else []
            nodes.append(VLLMServer(merged, arguments, work / f"node{rank}.log", environment))
        yield nodes[0]
    finally:
        for node in nodes:
            node.stop()


def test_machines_with_unequal_policies_do_not_serve(tiny_merged, tmp_path):
    """If they served, the ranks of one pass would multiply with different variants."""
    merged = tiny_merged(num_layers=2) / "merged"
    with pytest.raises(ServerError), two_nodes(merged, tmp_path, ["phase", "w8a8"]) as server:
        server.wait_until_healthy(START_SECONDS)
    for rank in range(2):
        log = (tmp_path / f"node{rank}.log").read_text()
        assert "rank 1 has other routes than rank 0; give every machine the same policy file" in log


def test_machines_with_equal_policies_serve(tiny_merged, tmp_path):
    merged = tiny_merged(num_layers=2) / "merged"
    with two_nodes(merged, tmp_path, ["phase", "phase"]) as server:
        server.wait_until_healthy(START_SECONDS)
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert complete(client, "two machines", 4, model=str(merged)).usage.completion_tokens == 4
