# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""After sleep a server answers as before: variants, what one copy computes with, and graphs stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import RUNNERS, graph_engine
from tests.integration.conftest import answers

pytestmark = pytest.mark.cuda
PROMPTS = ["a prompt", "another one"]


@pytest.mark.parametrize("policy", ["phase", "w8a8-from-int4"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_answers_after_sleep_at_level_1_are_those_before(runner: str, policy: str, checkpoints: Path) -> None:
    mode, options = "FULL_AND_PIECEWISE", {"max_tokens": 16, "ignore_eos": True}
    with graph_engine(checkpoints / "merged", runner, mode, policy, enable_sleep_mode=True) as llm:
        before = answers(llm, PROMPTS, **options)
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm, PROMPTS, **options) == before
