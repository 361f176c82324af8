# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A merge that is refused after it began to write: what was at the output is there, and nothing else."""

from __future__ import annotations

import threading

import pytest

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.unit.test_merge import contents


@pytest.mark.parametrize("output_exists", [False, True])
def test_a_refusal_while_shards_are_written_leaves_what_was_there(tmp_path, output_exists):
    def other_keys_in_the_last_layer(state):
        return {k: v * 2 if k.endswith("layers.1.self_attn.k_proj.weight") else v for k, v in state.items()}

    sources = {
        "w8a8": make_checkpoint(tmp_path / "w8a8", scheme="w8a8"),
        "w4a16": make_checkpoint(tmp_path / "w4a16", transform=other_keys_in_the_last_layer),
    }
    folder = tmp_path / "outputs"
    folder.mkdir()
    if output_exists:
        merge_checkpoints({"w8a8": sources["w8a8"]}, folder / "merged")
    before, threads = contents(folder), threading.active_count()
    during = []

    def kv_progress(done, total):
        during.extend(path.name for path in folder.glob(".merged.flexquant-tmp*/*"))
        assert {k: v for k, v in contents(folder).items() if not k.startswith(".")} == before

    with pytest.raises(FlexQuantError, match="layer 1.*k_proj"):
        merge_checkpoints(sources, folder / "merged", overwrite=True, kv_progress=kv_progress)
    assert during and all(name.endswith(".safetensors") for name in during)
    assert contents(folder) == before and len(list(folder.iterdir())) == output_exists
    assert threading.active_count() == threads
