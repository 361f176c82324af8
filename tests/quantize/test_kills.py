# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A few kills of quantising and building at random moments; test_build kills at chosen ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.kills import kill_often

OUTPUTS = {"quantize": ["variants", "--resume"], "build": ["merged"]}


@pytest.mark.full
@pytest.mark.parametrize("name", OUTPUTS)
def test_killed_it_leaves_nothing_half_done_and_can_run_again(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None)
    written, *options = OUTPUTS[name]

    def command(output: Path) -> list[str]:
        few = ["--samples", "4", "--length", "64"]
        return [name, str(model), "--output", str(output / written), *options, *few]

    kill_often(command, tmp_path, 2)
