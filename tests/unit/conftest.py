# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Small checkpoints and a device, made once for the tests that only read them; a container of a kind."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.synthetic import SCHEMES, write_checkpoint
from flexquant.checkpoint.merged_config import MergedConfig, read_merged_config
from flexquant.merge import merge_checkpoints
from flexquant.planning.device import Device, load_device
from tests.checkpoints import make_checkpoint
from tests.prediction import DEVICE
from tests.publishers import edits
from tests.unit.nested import make_nested_pair


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    path = tmp_path_factory.mktemp("device") / "mine.yaml"
    path.write_text(DEVICE)
    return load_device(str(path))


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return variants with all files that users have: w8a8 in two shards, w4a16 by another transformers."""
    folder = tmp_path_factory.mktemp("sources")
    made = {"w8a8": make_checkpoint(folder / "w8a8", scheme="w8a8", num_shards=2)}
    made["w4a16"] = make_checkpoint(folder / "w4a16", scheme="w4a16")
    edits.config(transformers_version="5.0.0")(made["w4a16"])
    for name, path in made.items():
        (path / "recipe.yaml").write_text(f"scheme: {name}\n")
        (path / "generation_config.json").write_text('{"temperature": 0.6}')
        (path / "chat_template.jinja").write_text("{{ messages }}")
    return made


@pytest.fixture(scope="session")
def w4a16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "w4a16", scheme="w4a16")


@pytest.fixture(scope="session")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_of(tmp_path_factory.mktemp("int8"), "w8a8")


@pytest.fixture(scope="session")
def config(merged: Path) -> MergedConfig:
    return read_merged_config(merged)[0]


def merge_of(folder: Path, eight_bit: str, policy: str | None = None, **options: object) -> Path:
    sources = {name: make_checkpoint(folder / name, scheme=name, **options) for name in (eight_bit, "w4a16")}
    merge_checkpoints(sources, folder / "merged", policy=policy)
    return folder / "merged"


@pytest.fixture(scope="session")
def merged_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_of(tmp_path_factory.mktemp("fp8"), "fp8", "fp8-phase-batch", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def nested_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_nested_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def nested_once(nested_pair: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nested") / "merged"
    merge_checkpoints(nested_pair, folder, nested="near")
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("synthetic") / "tiny"
    for scheme in SCHEMES:
        write_checkpoint(folder / scheme, SHAPES["tiny"], scheme)
    assert sorted(path.name for path in folder.iterdir()) == sorted(SCHEMES)
    return {scheme: folder / scheme for scheme in SCHEMES}


@pytest.fixture(scope="session")
def container() -> list[str]:
    """Return the start of a command whose rest runs as in a container: with its own process ids and mounts.

    No privileges are needed to make it, but a container's default seccomp profile refuses it inside.
    """
    command = ["unshare", "--map-root-user", "--pid", "--mount", "--fork", "--kill-child"]
    try:
        probe = [*command, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60)
        problem = done.returncode and (done.stderr.strip() or f"it ends with {done.returncode}")
    except FileNotFoundError:
        problem = "there is no such program"
    if problem:
        pytest.skip(f"this machine does not let its users make namespaces with unshare: {problem}")
    return command
