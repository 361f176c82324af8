# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' workloads, subjects and order of cells, start-up logs and results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.speed.command_line import choose_settings, make_parser, server_options
from benchmarks.speed.results import ROOT, SCHEMA, Results, end_of_log, read_about, read_cells
from benchmarks.speed.serving import paired_subjects, plan_cells
from benchmarks.speed.startup_log import parse_startup_log
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.workloads import Workload
from flexquant.errors import FlexQuantError
from tests.policies import THRESHOLD

# workloads


@pytest.mark.parametrize(
    "text, workload",
    [
        ("8x1024+128", Workload(8, 1024, 128)),
        ("200x1024+256@10~0.5", Workload(200, 1024, 256, rate=10, spread=0.5)),
        ("24x128+32@0.25", Workload(24, 128, 32, rate=0.25)),
        ("10x20+30~.25", Workload(10, 20, 30, spread=0.25)),
    ],
)
def test_workloads_are_read_and_named(text, workload):
    assert Workload.parse(text) == workload
    assert Workload.parse(workload.name) == workload
    assert Workload(**workload.describe()) == workload


@pytest.mark.parametrize(
    "text",
    ["", "8", "8x1024", "0x8+4", "00x8+4", "8x0+4", "8x8+0", "8x8+4@", "8x8+4@0", "8x8+4@0.0", "8x8+4~1"]
    + ["8x8+4~1.5", "8x8+4@-1", "-8x8+4", "8x8+4 ", "8x8+4~0.5@2", "8 x 8 + 4", "8X8+4"],
)
def test_what_is_no_workload_is_refused(text):
    with pytest.raises(FlexQuantError, match="is not a workload; write REQUESTSxINPUT") as caught:
        Workload.parse(text)
    assert "\n" not in str(caught.value)


def test_rounds_differ_in_their_prompts_and_subjects_do_not():
    def options(workload: Workload, number: int) -> dict[str, str]:
        arguments = workload.bench_arguments("http://host:1", "model", "folder", number)
        return dict(zip(arguments[:-3:2], arguments[1:-3:2], strict=True))

    stream = Workload(24, 128, 32, rate=2, spread=0.5)
    first = options(stream, 0)
    assert first == options(stream, 0)
    assert {key for key, value in options(stream, 1).items() if first[key] != value} == {"--seed"}
    expected = {"--num-prompts": "24", "--random-input-len": "128", "--random-output-len": "32"}
    assert (expected | {"--request-rate": "2", "--random-range-ratio": "0.5"}).items() <= first.items()
    assert options(Workload(8, 16, 4), 0)["--request-rate"] == "inf"


def test_servers_have_room_for_the_longest_request_and_the_largest_batch():
    args = make_parser("").parse_args(
        ["run", "--quick", "--serving", "200x8+4", "300x64+12@8~0.5", "--overhead", "2x8+4"]
    )
    settings = choose_settings(args, on_gpu=False)
    options = server_options(args, settings, [parse_subject("w8a8")], on_gpu=False)
    assert options.max_length >= 76 * 1.5
    # A stream never has all its requests in one batch.
    assert options.max_sequences == 200


# subjects and the order of the cells


def test_subjects_name_checkpoints_and_policies(tmp_path):
    (tmp_path / "mine.yaml").write_text(THRESHOLD)
    mine = parse_subject(f"flexquant:{tmp_path / 'mine.yaml'}")
    built_in = parse_subject("flexquant:phase-batch")
    assert mine.variants == built_in.variants == ("w8a8", "w4a16")
    assert parse_subject("flexquant:fp8-phase-batch").variants == ("fp8", "w4a16")
    assert parse_subject("w4a8").variants == ("w4a16",)
    assert not parse_subject("w4a8").is_merged and mine.is_merged
    assert parse_subject("w8a8").describe() == {"subject": "w8a8"}
    assert built_in.describe()["policy_crc32"] != mine.describe()["policy_crc32"]


def test_an_edited_policy_is_another_cell(tmp_path):
    (tmp_path / "mine.yaml").write_text(THRESHOLD)
    subject = parse_subject(f"flexquant:{tmp_path / 'mine.yaml'}")
    before = subject.describe()
    assert subject.describe() == before
    edited = THRESHOLD.replace("w8a8", "w4a16")
    assert edited != THRESHOLD
    (tmp_path / "mine.yaml").write_text(edited)
    assert subject.describe() != before


def test_rounds_go_forward_and_backward_and_overhead_takes_pairs():
    subjects = [parse_subject(name) for name in ("bf16", "w8a8", "flexquant:phase-batch", "flexquant:w8a8")]
    assert [s.name for s in paired_subjects(subjects)] == ["w8a8", "flexquant:w8a8"]
    parts = {"serving": [Workload(1, 8, 4)], "overhead": [Workload(2, 8, 4)]}
    cells = list(plan_cells(parts, subjects, rounds=2))
    assert [(c.round, c.part, c.subject.name) for c in cells] == [
        (0, "serving", "bf16"),
        (0, "serving", "w8a8"),
        (0, "serving", "flexquant:phase-batch"),
        (0, "serving", "flexquant:w8a8"),
        (0, "overhead", "w8a8"),
        (0, "overhead", "flexquant:w8a8"),
        (1, "serving", "flexquant:w8a8"),
        (1, "serving", "flexquant:phase-batch"),
        (1, "serving", "w8a8"),
        (1, "serving", "bf16"),
        (1, "overhead", "flexquant:w8a8"),
        (1, "overhead", "w8a8"),
    ]


# start-up logs

CPU_LOG = """\
(EngineCore pid=22075) INFO 11-21 12:41:19 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config:
(Worker pid=22558) INFO 11-21 12:42:10 [__init__.py:846] Selected ExactCPUInt8LinearKernel for CompressedTensorsW8A8Int8
(Worker pid=22558) INFO 11-21 12:42:10 [__init__.py:923] Using TorchCPUInt4LinearKernel for mixed-precision linear
(Worker pid=22558) INFO 11-21 12:42:10 [compressed_tensors_wNa16.py:138] Using TorchCPUInt4LinearKernel for CompressedTensorsWNA16
(Worker pid=22558) INFO 11-21 12:42:10 [model.py:78] FlexQuant 0.1.0: policy phase-batch; plans w8a8 (8 layers w8a8), w4a16 (8 layers w4a16); weights w8a8 24.2 MiB, w4a16 12.4 MiB, shared 8.0 MiB, in all 80 % of 16-bit
(Worker pid=22558) INFO 11-21 12:42:11 [default_loader.py:501] Loading weights took 0.08 seconds
(Worker pid=22558) INFO 11-21 12:42:12 [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0.
(EngineCore pid=22491) INFO 11-21 12:42:12 [kv_cache_utils.py:2327] CPU KV cache size: 117,760 tokens, Maximum concurrency for 115 tokens per request: 1024.00x
(EngineCore pid=22491) INFO 11-21 12:42:13 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.83 s
"""  # noqa: E501 - as vLLM 0.32 printed it
GPU_LOG = """\
(EngineCore_DP0 pid=7) INFO 11-21 12:00:01 [__init__.py:846] Selected CutlassInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8
(EngineCore_DP0 pid=7) INFO 11-21 12:00:01 [compressed_tensors_wNa16.py:138] Using MarlinLinearKernel for CompressedTensorsWNA16
(EngineCore_DP0 pid=7) INFO 11-21 12:00:09 [default_loader.py:501] Loading weights took 3.25 seconds
(EngineCore_DP0 pid=7) INFO 11-21 12:00:10 [gpu_model_runner.py:5149] Model loading took 8.49 GiB memory and 4.123456 seconds
(EngineCore_DP0 pid=7) INFO 11-21 12:00:30 [gpu_worker.py:759] Available KV cache memory: 101.5 GiB
(EngineCore_DP0 pid=7) INFO 11-21 12:00:30 [kv_cache_utils.py:2327] GPU KV cache size: 1,662,976 tokens, Maximum concurrency for 1,153 tokens per request: 1442.30x
(EngineCore_DP0 pid=7) INFO 11-21 12:00:42 [gpu_model_runner.py:6581] Graph capturing finished in 7 secs, took -0.62 GiB
(EngineCore_DP0 pid=7) INFO 11-21 12:00:42 [core.py:395] init engine (profile, create kv cache, warmup model) took 31.07 s (compilation: 12.50 s)
"""  # noqa: E501 - vLLM 0.32's formats, as on a GPU


def test_startup_log_of_a_cpu():
    assert parse_startup_log(CPU_LOG) == {
        "kv_cache_gib": 1.0,
        "kv_cache_tokens": 117760,
        "load_seconds": 0.08,
        "engine_seconds": 0.83,
        "kernels": ["ExactCPUInt8LinearKernel", "TorchCPUInt4LinearKernel"],
        "flexquant": "policy phase-batch; plans w8a8 (8 layers w8a8), w4a16 (8 layers w4a16); weights w8a8 "
        "24.2 MiB, w4a16 12.4 MiB, shared 8.0 MiB, in all 80 % of 16-bit",
        "variant_gib": {"w8a8": 24.2 / 1024, "w4a16": 12.4 / 1024, "shared": 8 / 1024},
    }


def test_startup_log_of_a_gpu():
    assert parse_startup_log(GPU_LOG) == {
        "weights_gib": 8.49,
        "kv_cache_gib": 101.5,
        "kv_cache_tokens": 1662976,
        "graph_gib": -0.62,
        "graph_seconds": 7,
        "load_seconds": 3.25,
        "engine_seconds": 31.07,
        "compile_seconds": 12.5,
        "kernels": ["CutlassInt8ScaledMMLinearKernel", "MarlinLinearKernel"],
    }


def test_startup_log_that_says_nothing():
    assert parse_startup_log("INFO:     Application startup complete.\n") == {"kernels": []}


def test_end_of_a_log_has_no_folders_of_this_machine():
    lines = [f"line {number}" for number in range(40)]
    text = "\n".join([*lines, f"(Worker pid=1) ERROR in {ROOT}/flexquant/model.py", f"at {Path.home()}/x"])
    end = end_of_log(text).splitlines()
    assert len(end) == 30
    assert end[-2] == "ERROR in ./flexquant/model.py"
    assert str(Path.home()) not in end[-1]


# results

PARAMETERS = {"model": "tiny", "layer": "o_proj", "tokens": 4, "schemes": ["bf16"]}


def test_a_saved_cell_is_found_again(tmp_path):
    results = Results(tmp_path / "new" / "results", "tiny", "abc")
    assert results.find("kernels", PARAMETERS) is None
    saved = results.save("kernels", PARAMETERS, 1.23456, result={"bf16": 1})
    assert (saved["schema"], saved["part"], saved["parameters"]) == (SCHEMA, "kernels", PARAMETERS)
    assert (saved["commit"], saved["seconds"], saved["result"]) == ("abc", 1.235, {"bf16": 1})
    assert saved["machine"]["cores"] and saved["versions"]["torch"] and saved["argv"]
    again = Results(results.folder, "tiny", "abc")
    assert again.find("kernels", PARAMETERS) == saved
    assert read_cells(results.folder) == [saved]
    assert again.find("serving", PARAMETERS) is None
    assert again.find("kernels", {**PARAMETERS, "tokens": 5}) is None
    assert Results(results.folder, "tiny", "other").find("kernels", PARAMETERS) is None


def test_a_failed_cell_is_kept_but_not_found(tmp_path):
    results = Results(tmp_path, "tiny", "abc")
    failed = results.save("kernels", PARAMETERS, 1, failure="no answer within 1 s")
    assert results.find("kernels", PARAMETERS) is None
    assert read_cells(tmp_path) == [failed]
    saved = results.save("kernels", PARAMETERS, 1, result={})
    assert results.find("kernels", PARAMETERS) == saved
    assert read_cells(tmp_path) == [saved]


def test_the_newest_of_equal_cells_counts(tmp_path):
    results = Results(tmp_path, "tiny", "old")
    for commit, finished, number in (("new", "2026-01-02", 2), ("old", "2026-01-01", 1)):
        cell = results.save("kernels", PARAMETERS, 1, result=number)
        document = json.dumps({**cell, "commit": commit, "finished": f"{finished}T00:00:00Z"})
        (tmp_path / "kernels" / f"{commit}.json").write_text(document)
        (results._path("kernels", PARAMETERS)).unlink()
    assert [cell["result"] for cell in read_cells(tmp_path)] == [2]


def test_another_models_folder_is_refused(tmp_path):
    Results(tmp_path, "tiny", "abc")
    with pytest.raises(FlexQuantError, match="results of the model 'tiny', not 'small'; choose another"):
        Results(tmp_path, "small", "abc")


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FlexQuantError, match="something else than speed results; choose another --output"):
        Results(tmp_path, "tiny", "abc")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text, message", [("{", "no readable suite.json"), ('{"schema": "v9"}', "'v9'")])
def test_an_unreadable_folder_is_refused(tmp_path, text, message):
    (tmp_path / "suite.json").write_text(text)
    for read in (read_about, lambda folder: Results(folder, "tiny", "abc")):
        with pytest.raises(FlexQuantError, match=message):
            read(tmp_path)


def test_commit_is_gits(tmp_path):
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = done.stdout.strip() if done.returncode == 0 else "unknown"
    assert Results(tmp_path, "tiny").environment["commit"].removesuffix("+changes") == expected
