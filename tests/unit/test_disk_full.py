# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging and splitting where files do not fit: one sentence, what was there stays, the next run succeeds."""

from __future__ import annotations

import sys

import pytest

from flexquant.checkpoint.output import staged_file
from flexquant.cli import explain_os_error
from flexquant.merge import merge_checkpoints, split_checkpoint
from tests import programs
from tests.quantize.quantizing import digests

SMALL = [pytest.param(4096, marks=pytest.mark.full), 65536]
"""Most bytes of a file: fewer than a tokenizer has, and fewer than a shard has."""


@pytest.mark.parametrize("most", SMALL)
@pytest.mark.parametrize("command", ["merge", "split"])
def test_what_does_not_fit(sources, tmp_path, command, most):
    """The commands are a merge over another checkpoint, and a split to where there was nothing."""
    output = tmp_path / "output"
    if command == "merge":
        merge_checkpoints({"w8a8": sources["w8a8"]}, output)
        merge_checkpoints(sources, tmp_path / "undisturbed")
        arguments = [*(f"{name}={folder}" for name, folder in sources.items()), "--overwrite"]
    else:
        merge_checkpoints(sources, tmp_path / "merged")
        split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "undisturbed")
        arguments = [tmp_path / "merged", "--variant", "w8a8"]
    before = digests(tmp_path)
    full = [sys.executable, "-m", "flexquant", command, *arguments, "--output", output]
    done = programs.run(programs.with_small_files(full, most), timeout=300, status=1)
    *_, sentence = done.stderr.splitlines()
    assert sentence.startswith(f"flexquant {command}: error: the disk ran full while writing {output}")
    assert "free some space" in sentence and "Traceback" not in done.stderr
    assert digests(tmp_path) == before
    programs.run(full, timeout=300)
    assert digests(output) == digests(tmp_path / "undisturbed")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_file_that_leads_to_a_full_device(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("old")
    (tmp_path / ".policy.yaml.flexquant-new").symlink_to("/dev/full")
    with pytest.raises(OSError) as refused, staged_file(file) as partial:
        partial.write_text("new")
    assert "the disk is full (No space left on device); free some space" in str(
        explain_os_error(refused.value)
    )
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
