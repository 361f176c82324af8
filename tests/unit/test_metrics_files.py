# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The files that a worker counts in have no holes, since a write to one ends the process on a full disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from flexquant.serving.worker.metrics import FILE_BYTES, SharedNumber, SharedNumbers
from tests import programs

KEYS = [f"{number} {'k' * 300}" for number in range(4000)]
"""Keys as long as those of 32 plans of 80 layers in all phases: they take more than FILE_BYTES."""
COUNT = """
import json, sys
from pathlib import Path
from flexquant.serving.worker.metrics import SharedNumber, SharedNumbers
from tests.unit.test_metrics_files import KEYS
file = Path(sys.argv[1]) / "counter.db"
memory = SharedNumbers(file)
numbers = [SharedNumber(memory, key) for key in KEYS]
for number in numbers * 2:
    number.add(1)
print(json.dumps([value for _, value, *_ in memory.read_all_values_from_file(file)]))
"""
"""A program that counts in a file of a folder, and prints what others read there."""


def test_every_byte_has_its_place_on_the_disk(tmp_path: Path) -> None:
    numbers = SharedNumbers(tmp_path / "counter.db")
    assert (tmp_path / "counter.db").stat().st_blocks * 512 >= FILE_BYTES
    for key in KEYS:
        SharedNumber(numbers, key).add(2)
        SharedNumber(numbers, key).add(3)
    found = (tmp_path / "counter.db").stat()
    assert found.st_blocks * 512 >= found.st_size > FILE_BYTES
    assert {key: value for key, value, _ in numbers.read_all_values()} == dict.fromkeys(KEYS, 5)


def test_a_place_that_has_no_room_is_named(tmp_path: Path, files_of_4_kib: None) -> None:
    with pytest.raises(
        FlexQuantError, match=r"cannot write 1024 KiB of metrics to .*counter.db \(File too large\)"
    ):
        SharedNumbers(tmp_path / "counter.db")


def test_on_a_full_disk_the_numbers_that_have_a_place_go_on(tmp_path: Path) -> None:
    if subprocess.run([*programs.OWN_MOUNTS, "true"], check=False).returncode:
        pytest.skip("this system lets its users mount nothing")
    mount = f'mount -t tmpfs -o size={FILE_BYTES + 65536} tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = [*programs.OWN_MOUNTS, "sh", "-c", mount, "sh", tmp_path, sys.executable, COUNT]
    done = programs.run(command, timeout=300)
    values = json.loads(done.stdout.splitlines()[-1])
    assert values == [2] * len(values) and 2000 < len(values) < len(KEYS)
    (warning,) = [line for line in (done.stdout + done.stderr).splitlines() if "no room for more" in line]
    assert "counter.db has no room for more metrics (No space left on device)" in warning
