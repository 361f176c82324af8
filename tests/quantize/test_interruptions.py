# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A few kills of quantising and building at random moments; test_build kills at chosen ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interruptions.commands import COMMANDS
from tests.interruptions.interrupting import interrupt_often
from tests.interruptions.started import Started


@pytest.mark.full
@pytest.mark.parametrize("name", ["quantize", "build"])
def test_killed_it_leaves_nothing_half_done_and_can_run_again(name: str, tmp_path: Path) -> None:
    assert interrupt_often(COMMANDS[name], tmp_path, 3, 0, Started.kill).times == 3
