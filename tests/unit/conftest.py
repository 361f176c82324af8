# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Small checkpoints and a device, made once for the tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.synthetic import SCHEMES, write_checkpoint
from flexquant import cli
from flexquant.merge import merge_checkpoints
from flexquant.prediction.device import Device, load_device
from tests.checkpoints import make_checkpoint
from tests.prediction import DEVICE


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    path = tmp_path_factory.mktemp("device") / "mine.yaml"
    path.write_text(DEVICE)
    return load_device(str(path))


@pytest.fixture(scope="session")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    sources = {name: make_checkpoint(folder / name, scheme=name) for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, folder / "merged")
    return folder / "merged"


@pytest.fixture(scope="session")
def merged_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    sources = {
        name: make_checkpoint(folder / name, scheme=name, tie_word_embeddings=True)
        for name in ("fp8", "w4a16")
    }
    merge_checkpoints(sources, folder / "merged", policy="fp8-phase-batch")
    return folder / "merged"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("synthetic") / "tiny"
    for scheme in SCHEMES:
        write_checkpoint(folder / scheme, SHAPES["tiny"], scheme)
    assert sorted(path.name for path in folder.iterdir()) == sorted(SCHEMES)
    return {scheme: folder / scheme for scheme in SCHEMES}


@pytest.fixture
def only_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "SUBCOMMANDS", ("predict",))
