# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One file is written whole or not at all: by many at once, through a link, into a pipe."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexquant.checkpoint.output import staged_file
from tests.unit.test_output import put


def test_of_many_writers_of_one_file_each_writes_it_whole(tmp_path):
    file, texts = tmp_path / "policy.yaml", [str(n) * 9999 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: put(file, text), texts * 20))
    assert file.read_text() in texts and list(tmp_path.iterdir()) == [file]


def test_what_a_killed_writer_left_is_removed_the_next_day_at_the_latest(tmp_path):
    old, recent = (tmp_path / f".file.json.flexquant-new-{name}" for name in ("old", "recent"))
    for left, days in ((old, 2.0), (recent, 0.5)):
        left.touch()
        os.utime(left, times=(time.time() - 86_400 * days,) * 2)
    file = put(tmp_path / "file.json", "new").with_name("file.json")
    assert {*tmp_path.iterdir()} == {file, recent}


def test_a_link_still_leads_to_the_file_that_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    for name, text in (("old.yaml", "old"), ("none yet.yaml", None)):
        file, link = tmp_path / "disk" / name, tmp_path / f"link to {name}"
        if text:
            file.write_text(text)
        link.symlink_to(file)
        put(link, "new")
        assert link.is_symlink() and file.read_text() == "new" and not file.is_symlink()
    assert len(list((tmp_path / "disk").iterdir())) == 2


def test_a_pipe_is_written_to_and_stays(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    put(pipe, "new")
    assert os.read(reader, 9) == b"new" and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
    os.close(reader)


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    file = tmp_path / "file.json"
    file.write_text("old")
    with pytest.raises(ValueError), staged_file(file) as partial:
        partial.write_text("ne")
        raise ValueError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with staged_file(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
