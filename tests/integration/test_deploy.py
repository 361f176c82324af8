# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The Dockerfile in examples/deploy: hadolint finds nothing wrong with it, and it names the plugin."""

from __future__ import annotations

import shutil

import pytest

from tests import programs

DOCKERFILE = programs.ROOT / "examples" / "deploy" / "Dockerfile"


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("hadolint"), reason="`make test-full` installs hadolint")
def test_hadolint_finds_nothing_wrong() -> None:
    programs.run(["hadolint", "--failure-threshold", "style", DOCKERFILE], timeout=120)


def test_both_images_serve_the_routes() -> None:
    assert DOCKERFILE.read_text().count("ENV VLLM_PLUGINS=flexquant") == 2
