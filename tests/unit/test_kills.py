# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A merge that is killed leaves nothing half done, and the same command finishes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.kills import check_left, kill_often

LARGER = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32768, "num_layers": 2}
"""A large vocabulary, so that a merge writes for longer than it compares."""


@pytest.mark.full
@pytest.mark.parametrize("over_another", [False, True])
def test_a_killed_merge_leaves_nothing_half_done_and_can_run_again(
    over_another: bool, tmp_path: Path
) -> None:
    sources = {s: make_checkpoint(tmp_path / s, scheme=s, **LARGER) for s in ("w8a8", "w4a16")}

    def prepare(output: Path) -> None:
        if over_another:
            merge_checkpoints({"w8a8": sources["w8a8"]}, output / "merged")

    def command(output: Path) -> list[str]:
        named = [f"{name}={folder}" for name, folder in sources.items()]
        return ["merge", *named, "--output", str(output / "merged"), "--overwrite"]

    kill_often(command, tmp_path, 2, prepare)


OLD, NEW = ({f"merged/{n}": f"{age} {n}" for n in ("config.json", "weights")} for age in ("old", "new"))


@pytest.mark.parametrize("left", [{}, OLD, NEW | {".merged.flexquant-tmp/weights": "half"}])
def test_what_may_be_left(left: dict[str, str]) -> None:
    check_left(left, OLD, NEW)


@pytest.mark.parametrize(
    "left",
    [
        {"merged/config.json": "new config.json"},
        {**NEW, "merged/weights": "old weights"},
        {**NEW, "merged/weights": "half"},
        {**NEW, "merged/more": "new"},
        {**NEW, "merged.new": "half"},
    ],
)
def test_what_must_not_be_left(left: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="is half done"):
        check_left(left, OLD, NEW)
