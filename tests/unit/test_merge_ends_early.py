# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A merge or split that ends early leaves what was there; the next one succeeds, and nothing is half done."""

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from flexquant import cli
from flexquant.checkpoint.output import staged_file
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from tests import programs
from tests.checkpoints import make_pair
from tests.kills import check_left, kill_often
from tests.quantize.quantizing import digests
from tests.refusals import refused
from tests.unit.edits import double_keys_of_the_last_layer


@pytest.mark.parametrize("output_exists", [False, True])
def test_a_refusal_while_shards_are_written_leaves_what_was_there(tmp_path, output_exists):
    sources = make_pair(tmp_path, change=double_keys_of_the_last_layer)
    folder = tmp_path / "outputs"
    folder.mkdir()
    if output_exists:
        merge_checkpoints({"w8a8": sources["w8a8"]}, folder / "merged")
    before, threads = digests(folder), threading.active_count()
    during = []

    def kv_progress(done, total):
        during.extend(path.name for path in folder.glob(".merged.flexquant-tmp*/*"))
        assert {k: v for k, v in digests(folder).items() if not k.startswith(".")} == before

    with refused("layer 1.*k_proj"):
        merge_checkpoints(sources, folder / "merged", overwrite=True, kv_progress=kv_progress)
    assert any(name.endswith(".safetensors") for name in during)
    assert digests(folder) == before and len(list(folder.iterdir())) == output_exists
    assert threading.active_count() == threads


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_interrupted_merge_leaves_nothing(sources, tmp_path, error):
    def interrupt(done, total):
        raise error

    with pytest.raises(error):
        merge_checkpoints(sources, tmp_path / "merged", progress=interrupt)
    assert not list(tmp_path.iterdir())


MERGE_IN_CHILD = """
import os, signal, sys
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints

def progress(done, total):
    if sys.argv[4] == "kill" and done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[4] == "fill":
        with open(os.path.join(os.path.dirname(sys.argv[3]), "filler"), "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(65536)):
                    pass
            except OSError:
                pass

try:
    sources = {"w8a8": sys.argv[1], "w4a16": sys.argv[2]}
    merge_checkpoints(sources, sys.argv[3], overwrite=True, progress=progress)
except FlexQuantError as e:
    sys.exit(str(e))
"""


def merge_in_child(sources, output, mode):
    """Run the command that merges in a child process."""
    return [sys.executable, "-c", MERGE_IN_CHILD, sources["w8a8"], sources["w4a16"], output, mode]


def test_killed_merge_leaves_the_old_output(sources, tmp_path):
    output = tmp_path / "merged"
    merge_checkpoints({"w8a8": sources["w8a8"]}, output)
    before = digests(output)
    programs.run(merge_in_child(sources, output, "kill"), timeout=120, status=-signal.SIGKILL)
    assert digests(output) == before
    (left,) = [p for p in tmp_path.iterdir() if p != output]
    assert left.name.startswith(".merged.flexquant-tmp") and not (left / "config.json").exists()
    merge_checkpoints(sources, output, overwrite=True)
    verify_checkpoint(output)
    assert list(tmp_path.iterdir()) == [output]


ON_SMALL_DISK = """
mount -t tmpfs -o size="$SIZE" tmpfs "$DISK" || exit 77
"$@"
code=$?
find "$DISK" -mindepth 1 ! -name filler
exit $code
"""


@pytest.mark.parametrize(
    ("size", "mode", "message"),
    [
        ("200k", "", r"needs [\d.]+ [KM]iB of free disk space, but .* has [\d.]+ KiB; free some"),
        ("8m", "fill", r"the disk ran full while writing .*; nothing is left of it, free some space"),
    ],
)
def test_disk_full(sources, tmp_path, container, size, mode, message):
    """The disk is in memory, and only the child sees it; what it leaves there is listed on stdout."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [*container, "sh", "-c", ON_SMALL_DISK, "sh", *merge_in_child(sources, disk / "merged", mode)]
    environment = {**os.environ, "SIZE": size, "DISK": str(disk)}
    result = programs.run(command, timeout=120, status=1, environment=environment)
    assert re.search(message, result.stderr) and "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("most", [4096, 65536], ids=["a tokenizer", "a shard"])
@pytest.mark.parametrize("command", ["merge", "split"])
def test_what_does_not_fit(sources, tmp_path, command, most, capsys):
    """The commands are a merge over another checkpoint, and a split to where there was nothing."""
    output = tmp_path / "output"
    if command == "merge":
        merge_checkpoints({"w8a8": sources["w8a8"]}, output)
        merge_checkpoints(sources, tmp_path / "undisturbed")
        arguments = [*(f"{name}={folder}" for name, folder in sources.items()), "--overwrite"]
    else:
        merge_checkpoints(sources, tmp_path / "merged")
        split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "undisturbed")
        arguments = [str(tmp_path / "merged"), "--variant", "w8a8"]
    before = digests(tmp_path)
    arguments = [command, *arguments, "--output", str(output)]
    sentence = programs.disk_full(arguments, most, capsys)
    assert sentence.startswith(f"flexquant {command}: error: the disk ran full while writing {output}")
    assert "free some space" in sentence and digests(tmp_path) == before
    assert cli.main(arguments) == 0 and digests(output) == digests(tmp_path / "undisturbed")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_file_that_does_not_fit(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("old")
    with programs.small_files(2), pytest.raises(OSError) as refused, staged_file(file) as partial:
        partial.write_text("new")
    assert "the disk is full (File too large); free some space" in str(cli.explain_os_error(refused.value))
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


LARGER = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32768, "num_layers": 2}
"""A large vocabulary, so that a merge writes for longer than it compares."""


@pytest.mark.full
@pytest.mark.parametrize("over_another", [False, True])
def test_a_killed_merge_leaves_nothing_half_done_and_can_run_again(over_another, tmp_path):
    sources = make_pair(tmp_path, **LARGER)

    def prepare(output: Path) -> None:
        if over_another:
            merge_checkpoints({"w8a8": sources["w8a8"]}, output / "merged")

    def command(output: Path) -> list[str]:
        named = [f"{name}={folder}" for name, folder in sources.items()]
        return ["merge", *named, "--output", str(output / "merged"), "--overwrite"]

    kill_often(command, tmp_path, 2, prepare)


OLD, NEW = ({f"merged/{n}": f"{age} {n}" for n in ("config.json", "weights")} for age in ("old", "new"))


@pytest.mark.parametrize("left", [{}, OLD, NEW | {".merged.flexquant-tmp/weights": "half"}])
def test_what_may_be_left(left):
    check_left(left, OLD, NEW)


@pytest.mark.parametrize(
    "left",
    [{"merged/config.json": "new config.json"}, {**NEW, "merged/weights": "old weights"}]
    + [{**NEW, "merged/weights": "half"}, {**NEW, "merged/more": "new"}, {**NEW, "merged.new": "half"}],
)
def test_what_must_not_be_left(left):
    with pytest.raises(AssertionError, match="is half done"):
        check_left(left, OLD, NEW)
