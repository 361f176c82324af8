# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Generation settings of two sources: by which of their values serving differs, key by key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from flexquant.merge.formats import open_source
from flexquant.merge.sidecar_plan import plan_sidecars
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return {name: make_checkpoint(folder / name, scheme=name, num_layers=1) for name in ("w8a8", "w4a16")}


@pytest.mark.parametrize(
    ("key", "without_effect", "other"),
    [
        ("repetition_penalty", [1, 1.0, None], 1.1),
        ("presence_penalty", [0, 0.0, None], 0.5),
        ("frequency_penalty", [0, 0.0, None], 0.5),
        ("temperature", [1, 1.0, None], 0.6),
        ("top_k", [0, -1, None], 40),
        ("top_p", [1, 1.0, None], 0.9),
        ("min_p", [0, 0.0, None], 0.1),
        ("max_new_tokens", [None], 512),
        ("eos_token_id", [[]], 257),
    ],
)
def test_each_setting_decides(
    pair: dict[str, Path], key: str, without_effect: list[object], other: object
) -> None:
    def plan(value: object) -> None:
        for folder, stated in zip(pair.values(), ({key: value}, {}), strict=True):
            (folder / "generation_config.json").write_text(json.dumps(stated))
        plan_sidecars([open_source(name, folder) for name, folder in pair.items()])

    for value in without_effect:
        plan(value)
    with pytest.raises(FlexQuantError, match=f"'w8a8' and 'w4a16' differ in {key}: .*--generation-from w8a8"):
        plan(other)
