# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the speed benchmarks note of a measurement, and refusals of the commands."""

from __future__ import annotations

import gc
import re
import signal
import socket
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.speed.bench_client import bench
from benchmarks.speed.results import Results
from benchmarks.speed.serving import STALLED, short_of_memory, stalled_seconds
from benchmarks.speed.workloads import Workload
from tests.checkpoints import make_checkpoint


def test_a_call_leaves_nothing_that_is_never_collected(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path / "model", scheme=None))
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        arguments = Workload.parse("1x8+4").bench_arguments(url, model, model, 0)
        with pytest.raises(ValueError, match="Initial test run failed"):
            bench([*arguments, "--ready-check-timeout-sec", "1"])
    assert gc.get_freeze_count() == 0


TOLD = """some avg10=0.14 avg60=25.67 avg300=39.13 total=249795381
full avg10=0.10 avg60=19.99 avg300=30.56 total=186911466
"""


def test_measurements_that_were_disturbed_are_counted(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text(TOLD)
    assert stalled_seconds(tmp_path / "memory") == 186.911466
    assert stalled_seconds(tmp_path / "missing") == 0
    assert stalled_seconds() >= 0
    calm = {"duration": 2.0, STALLED: 0.01}
    assert short_of_memory([calm, {"duration": 2.0}]) == ""
    told = short_of_memory([calm, {"duration": 2.0, STALLED: 0.3}])
    assert told.startswith("In 1 of 2 measurements") and "fewer subjects" in told


# the command line


@pytest.fixture
def command(capsys):
    """Return a function that runs ``main`` and returns its status and stderr; undo the handler that it sets.

    A run may begin no cell, so that one which is not refused starts no servers.
    """
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str | Path) -> tuple[int, str]:
        limit = ["--time-limit", "0"] if arguments[0] == "run" else []
        return main([*map(str, arguments), *limit]), capsys.readouterr().err

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no model is given; add --model, e.g. --model 0.5b, or try --quick"),
        (["--model", "gpt"], "'gpt' is not a model; choose from tiny, small, "),
        (["--model", "tiny", "--parts", "kernels,serve"], "'serve' is not a part; choose from kernels, "),
        (["--model", "tiny", "--schemes", "w8a8,w2a16"], "'w2a16' is not a scheme; choose from bf16, "),
        (["--model", "tiny", "--layers", "lm_head"], "'lm_head' is not a layer; choose from qkv_proj, "),
        (["--model", "tiny", "--tokens", "1,0"], "'0' is not a number of tokens; give whole numbers"),
        (["--model", "tiny", "--tokens", "many"], "'many' is not a number of tokens; give whole numbers"),
        (["--model", "tiny", "--serving", "8x8"], "'8x8' is not a workload; write REQUESTSxINPUT+OUTPUT"),
        (["--model", "tiny", "--subjects", "w2a16"], "'w2a16' is not a subject; choose from bf16, "),
        (["--model", "tiny", "--subjects", "flexquant:none"], "none"),
        (["--model", "w2a16=x"], "'w2a16=x' does not name a checkpoint; write VARIANT=FOLDER"),
        (["--model", "w8a8=", "w4a16=x"], "'w8a8=' does not name a checkpoint; write VARIANT=FOLDER"),
        (["--model", "w8a8=absent"], "absent is not a checkpoint folder (no config.json); correct 'w8a8="),
    ],
)
def test_command_line_errors_take_one_line_and_leave_nothing(command, tmp_path, arguments, message):
    folders = ["--work", tmp_path / "work", "--output", tmp_path / "results"]
    code, error = command("run", *arguments, *folders)
    assert code == 1
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_variant_that_is_not_given_is_missed_before_anything_is_measured(command, checkpoints, tmp_path):
    model = [f"w8a8={checkpoints['w8a8']}", f"bf16={checkpoints['bf16']}"]
    folders = ["--work", tmp_path / "work", "--output", tmp_path / "results"]
    for subjects, missing in (("w8a8,w4a16", "w4a16"), ("w8a8,flexquant:w8a8", "merged")):
        parts = ["--parts", "kernels,serving", "--subjects", subjects]
        code, error = command("run", "--model", *model, *parts, *folders)
        subject = subjects.partition(",")[2]
        assert code == 1
        assert error == (
            f"error: subject '{subject}' needs the checkpoint '{missing}' of tiny, but given are w8a8, bf16; "
            f"add {missing}=FOLDER to --model, or leave it out of --subjects\n"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_shape_is_refused(command, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_head": 12}')
    code, error = command("run", "--model", f"bf16={tmp_path}", "--output", tmp_path / "results")
    assert code == 1
    assert re.fullmatch("error: .*num_attention_heads.*\n", error)


def test_report_of_anything_else_is_refused(command, tmp_path):
    code, error = command("report", tmp_path / "absent")
    message = (
        f"{tmp_path / 'absent'} is not a folder of speed results (no readable cells.jsonl); "
        "give the --output of a run"
    )
    assert (code, error) == (1, f"error: {message}\n")
    Results(tmp_path / "begun", "tiny", "abc")
    code, error = command("report", tmp_path / "begun")
    assert (code, error) == (1, f"error: {tmp_path / 'begun'} holds no results yet; start the run again\n")
