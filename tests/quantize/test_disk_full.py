# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantising and building where files do not fit: one sentence, nothing half done, the next run succeeds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexquant import cli
from flexquant.merge import verify_checkpoint
from tests import programs
from tests.quantize.quantizing import OPTIONS, digests

SECONDS = 600


@pytest.mark.parametrize("most", [pytest.param(4096, marks=pytest.mark.full), 65536])
def test_a_variant_that_does_not_fit(model, tmp_path, most, capsys):
    output = tmp_path / "variants"
    command = ["quantize", str(model), "--output", str(output), "--resume", *OPTIONS]
    assert programs.disk_full(command, most, capsys).startswith(
        f"flexquant quantize: error: the disk ran full while writing {output / 'w8a8'}"
    )
    assert digests(tmp_path).keys() == {"variants/calibration.jsonl"}, "which is whole"
    assert cli.main(command) == 0
    assert {"w8a8/config.json", "w4a16/config.json"} <= digests(output).keys()


# The unit tests know the check of free space; this one finds that quantising no longer asks it.
@pytest.mark.full
def test_a_disk_without_room_is_told_before_quantising(model: Path, tmp_path: Path) -> None:
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mounted += ['mount -t tmpfs -o size=128k tmpfs "$0" || exit 77; "$@"', str(tmp_path)]
    if subprocess.run([*mounted, "true"], capture_output=True, timeout=SECONDS).returncode:
        pytest.skip("this machine does not let its users mount a disk of their own")
    command = ["quantize", model, "--output", tmp_path / "variants", "--recipe", "rtn"]
    done = programs.run([*mounted, sys.executable, "-m", "flexquant", *command], timeout=SECONDS, status=1)
    assert re.search(r"needs [\d.]+ KiB of free disk space, but .* has [\d.]+ KiB", done.stderr)
    assert "quantising" not in done.stderr


def test_a_merge_that_does_not_fit_keeps_the_variants(model, variants, tmp_path, capsys):
    """The variants are from an earlier run, with files larger than now fit."""
    output, kept = tmp_path / "merged", tmp_path / "merged-variants"
    shutil.copytree(variants, kept)
    before = digests(tmp_path)
    command = ["build", str(model), "--output", str(output), *OPTIONS]
    assert programs.disk_full(command, 65536, capsys).startswith(
        f"flexquant build: error: the disk ran full while writing {output}"
    )
    assert digests(tmp_path) == before
    assert cli.main(command) == 0
    assert digests(kept) == digests(variants)
    verify_checkpoint(output, {name: kept / name for name in ("w8a8", "w4a16")})
