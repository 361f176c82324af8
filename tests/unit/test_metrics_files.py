# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The files that a worker counts in have no holes, since a write to one ends the process on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from flexquant.serving.metrics import FILE_BYTES, SharedNumber, shared_file


def test_every_byte_has_its_place_on_the_disk(tmp_path: Path) -> None:
    numbers = shared_file(tmp_path / "counter.db")
    assert (tmp_path / "counter.db").stat().st_blocks * 512 >= FILE_BYTES
    SharedNumber(numbers, "a").add(2)
    SharedNumber(numbers, "a").add(3)
    assert [value for _, value, _ in numbers.read_all_values()] == [5]


def test_a_place_that_has_no_room_is_named(tmp_path: Path, files_of_4_kib: None) -> None:
    with pytest.raises(
        FlexQuantError, match=r"cannot write 1024 KiB of metrics to .*counter.db \(File too large\)"
    ):
        shared_file(tmp_path / "counter.db")
