# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Container and service files in examples/deploy: the tool that knows a kind finds nothing wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from flexquant.serving.frontend.client import ADMIN_KEY
from tests import programs

FOLDER = programs.ROOT / "examples" / "deploy"
SERVICE = "flexquant.service"
VLLM = "/opt/flexquant/bin/vllm"

LINTERS = {
    "Dockerfile": ("hadolint", "--failure-threshold", "style"),
    "kubernetes.yaml": ("kubernetes-validate", "--strict"),
    "compose.yaml": ("check-jsonschema", "--builtin-schema", "vendor.compose-spec"),
    "prometheus.yml": ("promtool", "check", "config"),
    SERVICE: ("systemd-analyze", "verify"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LINTERS)
def test_its_own_tool_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    tool, *options = LINTERS[name]
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    content = (FOLDER / name).read_text()
    if name == SERVICE:
        assert content.count(VLLM) == 1
        content = content.replace(VLLM, "/bin/true")  # the tool asks whether the program is there
    (tmp_path / name).write_text(content)
    done = programs.run([tool, *options, tmp_path / name], timeout=120, folder=tmp_path)
    complaints = [line for line in done.stderr.splitlines() if name in line and "INFO" not in line]
    assert complaints == []


@pytest.mark.full
def test_the_tools_find_what_is_wrong(tmp_path: Path) -> None:
    if shutil.which("kubernetes-validate") is None:
        pytest.skip("no kubernetes-validate here")
    wrong = (FOLDER / "kubernetes.yaml").read_text().replace("replicas: 1", "replicas: one")
    (tmp_path / "wrong.yaml").write_text(wrong)
    with pytest.raises(pytest.fail.Exception):
        programs.run(["kubernetes-validate", tmp_path / "wrong.yaml"], timeout=120, folder=tmp_path)


def test_files_that_are_mounted_are_there_and_the_names_are_flexquants() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    mounts = [v.split(":")[0] for service in compose["services"].values() for v in service.get("volumes", [])]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) == 4
    assert all((FOLDER / file).is_file() for file in files)
    assert (FOLDER / compose["services"]["flexquant"]["build"]["context"] / "pyproject.toml").is_file()
    for name in ("compose.yaml", "kubernetes.yaml", SERVICE):
        assert ADMIN_KEY in (FOLDER / name).read_text()
    for name in ("Dockerfile", SERVICE):
        assert "VLLM_PLUGINS=flexquant" in (FOLDER / name).read_text()
