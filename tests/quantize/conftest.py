# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One small random model, quantised once by the default recipe, for tests that only look at the result."""

import os
import shutil

# Matrices this small take longer to share among threads than to compute in one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# huggingface_hub reads it where it is imported, and then refuses an unknown dataset without asking again.
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.quantize.quantizing import quantize


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", scheme=None)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of one layer, which tests only read."""
    return make_checkpoint(tmp_path_factory.mktemp("small") / "model", scheme=None, num_layers=1)


@pytest.fixture
def own(small: Path, tmp_path: Path) -> Path:
    """Return a copy of ``small``, for a test to change."""
    return Path(shutil.copytree(small, tmp_path / "model"))


@pytest.fixture
def finished(first_run: Path, tmp_path: Path) -> Path:
    """Return what the first run of a file left, for a test to change."""
    return Path(shutil.copytree(first_run, tmp_path / "variants"))


@pytest.fixture(scope="session")
def variants(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with w8a8 and w4a16, which tests only read."""
    output = tmp_path_factory.mktemp("quantised") / "variants"
    quantize(model, output)
    return output
