# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Heads that predict further tokens (MTP) are merged from each source that has them, and split off again."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_config import read_model_config
from flexquant.checkpoint.safetensors_io import same_bytes
from flexquant.merge import merge_checkpoints, split_checkpoint
from tests.checkpoints import make_pair
from tests.mtp import KINDS, is_of_head, make_mtp_pair

BOTH = ("w8a8", "w4a16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "quantised", "of"),
    [(BOTH, (), "w8a8"), (BOTH, BOTH, "w8a8"), (("w8a8",), ("w8a8",), "w8a8"), (("w4a16",), (), "w4a16")],
)
def test_heads_of_either_source_are_merged(
    kind: str, heads: tuple[str, ...], quantised: tuple[str, ...], of: str, tmp_path: Path
) -> None:
    pair, merged = make_mtp_pair(tmp_path, kind, heads=heads, quantised=quantised), tmp_path / "merged"
    merge_checkpoints(pair, merged)
    _, config = read_model_config(merged)
    assert config.draft_heads == of
    assert not any(is_of_head(f"{module}.") for module in config.shared_modules)
    kept = {key for key in read_tensors(merged) if is_of_head(key.partition(".")[2])}
    norms = {key for key in kept if "norm" in key}
    in_both = heads == BOTH
    assert norms and {key.partition(".")[0] for key in norms} == {"shared" if in_both else of}
    if in_both:
        own = {key.partition(".")[0] for key in kept} - {"shared"}
        assert own == {*quantised}, "heads in 16 bit are stored once"
    for variant, source in pair.items():
        split_checkpoint(merged, variant, tmp_path / "split" / variant)
        before, after = read_tensors(source), read_tensors(tmp_path / "split" / variant)
        assert before.keys() == after.keys()
        assert all(same_bytes(before[key], after[key]) for key in before if is_of_head(key))


def test_heads_of_a_nested_variant_are_stored_as_they_are(tmp_path: Path) -> None:
    pair, merged = make_mtp_pair(tmp_path, "MiMo", quantised=BOTH), tmp_path / "merged"
    merge_checkpoints(pair, merged, nested="near")
    _, config = read_model_config(merged)
    assert config.nested == {"w8a8": "w4a16"} and config.draft_heads == "w8a8"
    before, after = read_tensors(pair["w8a8"]), read_tensors(merged)
    weights = [
        key for key in before if is_of_head(key) and key.endswith(("proj.weight", "proj.weight_scale"))
    ]
    assert len(weights) == 2 * 7 + 1
    assert all(same_bytes(before[key], after.get(f"w8a8.{key}") or after[f"shared.{key}"]) for key in weights)


def test_without_heads_the_config_names_none(tmp_path: Path) -> None:
    merge_checkpoints(make_pair(tmp_path), tmp_path / "merged")
    config, section = read_model_config(tmp_path / "merged")
    assert section.draft_heads is None and "draft_heads" not in config["quantization_config"]
