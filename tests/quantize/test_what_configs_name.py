# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a 16-bit model's files name is neither loaded nor fetched nor run when it is quantised."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from tests.checkpoints import make_checkpoint
from tests.what_configs_name import MAY_REFUSE, run_all


@pytest.mark.full
def test_what_is_named_is_not_touched(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", scheme=None, num_layers=1)
    for name in "ab":
        shutil.copytree(made, tmp_path / "quantize" / name)
    found = run_all(tmp_path, KERNELS_MIN_VERSION, ["quantize"])["quantize"]
    for key, (status, said, touched) in found.items():
        assert not touched, key
        assert status == 0 or (key in MAY_REFUSE and "flexquant quantize: error: " in said), (key, said)
