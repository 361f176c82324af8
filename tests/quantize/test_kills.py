# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A few kills of quantising and building at random moments; test_build kills at chosen ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills.commands import COMMANDS
from tests.kills.killing import kill_often


@pytest.mark.full
@pytest.mark.parametrize("name", ["quantize", "build"])
def test_killed_it_leaves_nothing_half_done_and_can_run_again(name: str, tmp_path: Path) -> None:
    assert kill_often(COMMANDS[name], tmp_path, 3, seed=0).kills == 3
