# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a measurement's device is called, also in edited documents, and how the doctor writes findings."""

from __future__ import annotations

import os
from typing import Any

import pytest

from examples.vllm_server import default_environment
from flexquant.doctor import Finding
from flexquant.evaluation.engine import describe_command, describe_machine, prepare_environment
from flexquant.policy.pass_times import device_name


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        ({"machine": {"cpu": "C", "cores": 2, "gpu": "NVIDIA L4"}}, "NVIDIA L4"),
        ({"machine": {"cpu": "C", "cores": 2, "gpu": None}}, "C, 2 cores"),
        ({"machine": "my laptop"}, "my laptop"),
        ({}, "an unknown machine"),
    ],
)
def test_devices_are_named(origin: dict[str, Any], name: str) -> None:
    assert device_name(origin) == name


def test_this_machine_has_a_name() -> None:
    machine = describe_machine()
    assert device_name({"machine": machine}).startswith(machine["gpu"] or machine["cpu"])


def test_a_command_tells_nothing_of_where_its_files_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/opt/bin/flexquant", "eval", "/home/anna/secret/merged", "--text", "a/b"]
    )
    assert describe_command() == ["flexquant", "eval", "merged", "--text", "a/b"]


def test_a_server_takes_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert default_environment()["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert default_environment()["VLLM_CPU_KVCACHE_SPACE"] == "7"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "7")
    prepare_environment()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_a_mark_tells_what_could_be_better_from_what_does_not_serve() -> None:
    marks = {level: Finding(level, "memory", "text").line() for level in ("ok", "note", "problem")}
    assert marks == {"ok": "  memory     text", "note": "! memory     text", "problem": "X memory     text"}
