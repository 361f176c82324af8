# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging notes variants whose linears take other inputs than the first one's: no adapter fits both."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.unit.edits import Edit, in_float32, rotate_residual, scale_up_to_down, smooth_norms


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda state: None, ()),
        (smooth_norms(), ("other",)),
        (scale_up_to_down, ("other",)),
        (rotate_residual, ("other",)),
    ],
    ids=["plain", "norms smoothed", "up to down smoothed", "rotated"],
)
def test_a_variant_whose_linears_take_other_inputs_is_noted(
    tmp_path: Path, edit: Edit, expected: tuple[str, ...], scheme: str
) -> None:
    sources = {
        "w4a16": make_checkpoint(tmp_path / "first", scheme="w4a16"),
        "w8a8": make_checkpoint(tmp_path / "alike", scheme="w8a8"),
        "other": make_checkpoint(tmp_path / "other", scheme=scheme, transform=in_float32(edit)),
    }
    merge_checkpoints(sources, tmp_path / "merged")
    assert read_merged_config(tmp_path / "merged")[0].rescaled == expected
