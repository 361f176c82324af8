# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' workloads and subjects, started servers and results."""

import json
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from benchmarks.speed.results import CELLS, SCHEMA, Results, end_of_log, read_cells, read_header, read_lines
from benchmarks.speed.servers import announcement, kv_cache_size
from benchmarks.speed.settings import CPU, GPU, QUICK, Settings
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.workloads import Workload
from flexquant.checkpoint.weight_bytes import describe_bytes
from flexquant.errors import FlexQuantError
from tests.policies import THRESHOLD
from tests.programs import ROOT


@pytest.mark.parametrize(
    "text, workload",
    [
        ("8x1024+128", Workload(8, 1024, 128)),
        ("200x1024+256@10~0.5", Workload(200, 1024, 256, rate=10, spread=0.5)),
        ("24x128+32@0.25", Workload(24, 128, 32, rate=0.25)),
        ("10x20+30~.25", Workload(10, 20, 30, spread=0.25)),
        ("30x128+16/1", Workload(30, 128, 16, at_once=1)),
        ("30x128+16/2~0.5", Workload(30, 128, 16, at_once=2, spread=0.5)),
    ],
)
def test_workloads_are_read_and_named(text, workload):
    assert Workload.parse(text) == workload and Workload.parse(workload.name) == workload
    assert Workload(**workload.describe()) == workload


@pytest.mark.parametrize(
    "text",
    ["", "8", "8x1024", "0x8+4", "8x0+4", "8x8+0", "8x8+4@", "8x8+4@0.0", "8x8+4~1", "8x8+4@-1", "-8x8+4"]
    + ["8x8+4 ", "8x8+4~0.5@2", "8x8+4/0", "8x8+4/", "8x8+4@1/1", "8 x 8 + 4", "8X8+4", "8x8+1"],
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
    assert options(Workload(30, 16, 4, at_once=1), 0)["--max-concurrency"] == "1"
    assert "--max-concurrency" not in first


@pytest.mark.parametrize("settings", [QUICK, CPU, GPU])
def test_a_cell_of_single_requests_holds_many(settings: Settings) -> None:
    alone = [w for w in settings.serving if w.rate is None and w.most_at_once == 1]
    assert alone and all(workload.requests >= 30 for workload in alone)
    assert "at_once" not in Workload(8, 16, 4).describe()


def test_subjects_name_checkpoints_and_policies(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(THRESHOLD)
    mine, built_in = parse_subject(f"flexquant:{file}"), parse_subject("flexquant:phase-batch")
    assert mine.variants == built_in.variants == ("w8a8", "w4a16")
    assert parse_subject("flexquant:fp8-phase-batch").variants == ("fp8", "w4a16")
    assert parse_subject("w4a8").variants == ("w4a16",)
    assert not parse_subject("w4a8").is_merged and mine.is_merged
    assert parse_subject("w8a8").describe() == {"subject": "w8a8"}
    before = mine.describe()
    assert built_in.describe()["policy_crc32"] != before["policy_crc32"]
    file.write_text(THRESHOLD.replace("w8a8", "w4a16"))
    assert mine.describe() != before, "an edited policy is another cell"


def metrics(**labels: object) -> str:
    """Return metrics as vLLM exports its CacheConfig: a gauge of 1, with all its values as labels."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "other", registry=registry).set(0)
    gauge = Gauge("vllm:cache_config_info", "CacheConfig", labelnames=list(labels), registry=registry)
    gauge.labels(**labels).set(1)
    return generate_latest(registry).decode()


def test_kv_cache_as_vllm_tells_it():
    common = {"block_size": 128, "cache_dtype": "auto", "num_gpu_blocks": 920, "sliding_window": None}
    told = metrics(**common, kv_cache_size_tokens=117_000, engine=0)
    blocks = {"kv_cache_blocks": 920, "kv_cache_block_size": 128}
    assert kv_cache_size(told) == {**blocks, "kv_cache_tokens": 117_000}
    # vLLM before 0.32 tells no tokens, and a later one may not know them.
    for older in (metrics(**common), metrics(**common, kv_cache_size_tokens=None)):
        assert kv_cache_size(older) == {**blocks, "kv_cache_tokens": 920 * 128}
    for nothing in ("", metrics(block_size=128, num_gpu_blocks=None)):
        assert kv_cache_size(nothing) == {}


def test_flexquants_announcement():
    gib = 1 << 30
    held = {"w8a8": {"0-3": 3 * gib, "6": gib, "": gib // 2}, "w4a16": {"0-3": gib}, "shared": {"": gib // 8}}
    said = "policy phase-batch; plans w8a8 (8 layers w8a8), w4a16 (8 layers w4a16); weights "
    said += f"{describe_bytes(held)}, in all 80 % of 16-bit"
    log = f"(Worker pid=1) INFO a\n(Worker pid=1) INFO 11-21 [model.py:78] FlexQuant 0.1.0: {said}\nb\n"
    in_gib = {"w8a8": 4.5, "w4a16": 1.0, "shared": 0.125}
    assert announcement(log) == {"flexquant": said, "variant_gib": in_gib}
    assert announcement("INFO:     Application startup complete.\n") == {}


def test_end_of_a_log_has_no_folders_of_this_machine():
    lines = [f"line {number}" for number in range(40)]
    text = "\n".join([*lines, f"(Worker pid=1) ERROR in {ROOT}/flexquant/model.py", f"at {Path.home()}/x"])
    end = end_of_log(text).splitlines()
    assert len(end) == 30 and end[-2] == "ERROR in ./flexquant/model.py"
    assert str(Path.home()) not in end[-1]


PARAMETERS = {"model": "tiny", "layer": "o_proj", "tokens": 4, "schemes": ["bf16"]}


def test_a_saved_cell_is_found_again(tmp_path):
    results = Results(tmp_path / "new" / "results", "tiny", "abc")
    assert results.find("kernels", PARAMETERS) is None
    saved = results.save("kernels", PARAMETERS, 1.23456, result={"bf16": 1})
    assert (saved["schema"], saved["part"], saved["parameters"]) == (SCHEMA, "kernels", PARAMETERS)
    assert (saved["commit"], saved["seconds"], saved["result"]) == ("abc", 1.235, {"bf16": 1})
    assert saved["machine"]["cores"] and saved["versions"]["torch"] and saved["argv"]
    assert results.find("kernels", PARAMETERS) == saved
    before = (results.folder / CELLS).read_bytes()
    again = Results(results.folder, "tiny", "abc")
    assert again.find("kernels", PARAMETERS) == saved and read_cells(results.folder) == [saved]
    assert again.find("serving", PARAMETERS) is None
    assert again.find("kernels", {**PARAMETERS, "tokens": 5}) is None
    assert Results(results.folder, "tiny", "other").find("kernels", PARAMETERS) is None
    assert (results.folder / CELLS).read_bytes() == before, "opening writes nothing"


def test_a_cell_says_only_what_the_header_does_not(tmp_path):
    Results(tmp_path, "tiny", "abc").save("kernels", PARAMETERS, 1, result={})
    Results(tmp_path, "tiny", "def").save("kernels", PARAMETERS, 2, result={})
    header, first, second = (json.loads(line) for line in (tmp_path / CELLS).read_text().splitlines())
    assert header.keys() == {"schema", "model", "machine", "versions", "commit", "argv"}
    own = {"part", "parameters", "result", "finished", "seconds"}
    assert (first.keys(), second.keys()) == (own, {*own, "commit"})
    assert [cell["commit"] for cell in read_lines(tmp_path)[1]] == ["abc", "def"]


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_torn_last_line_is_left_out_and_its_cell_measured_again(tmp_path, capsys, kept):
    results = Results(tmp_path, "tiny", "abc")
    other = {**PARAMETERS, "tokens": 5}
    saved = results.save("kernels", PARAMETERS, 1, result={"text": "one\u2028two"})
    whole = (tmp_path / CELLS).read_bytes()
    results.save("kernels", other, 1, result={})
    torn = (tmp_path / CELLS).read_bytes()[len(whole) :][:kept]
    (tmp_path / CELLS).write_bytes(whole + torn)
    assert read_cells(tmp_path) == [saved]
    assert "its last line was not written to the end; its cell is left out" in capsys.readouterr().out
    # Reading changes nothing, but the next run mends the end.
    assert (tmp_path / CELLS).read_bytes() == whole + torn
    again = Results(tmp_path, "tiny", "abc")
    assert again.find("kernels", other) is None and (tmp_path / CELLS).read_bytes() == whole
    measured = again.save("kernels", other, 1, result={"n": 2})
    capsys.readouterr()
    assert read_cells(tmp_path) == [saved, measured] and capsys.readouterr().out == ""


def test_a_last_line_without_its_line_break_is_kept(tmp_path, capsys):
    saved = Results(tmp_path, "tiny", "abc").save("kernels", PARAMETERS, 1, result={})
    (tmp_path / CELLS).write_bytes((tmp_path / CELLS).read_bytes()[:-1])
    again = Results(tmp_path, "tiny", "abc")
    assert again.find("kernels", PARAMETERS) == saved
    again.save("kernels", {**PARAMETERS, "tokens": 5}, 1, result={})
    assert len(read_cells(tmp_path)) == 2 and capsys.readouterr().out == ""


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"part": "kernels"}'])
def test_any_other_line_that_is_no_cell_is_named_and_kept(tmp_path, line):
    results = Results(tmp_path, "tiny", "abc")
    (tmp_path / CELLS).write_text((tmp_path / CELLS).read_text() + line + "\n")
    results.save("kernels", PARAMETERS, 1, result={})
    before = (tmp_path / CELLS).read_bytes()
    for read in (read_cells, lambda folder: Results(folder, "tiny", "abc")):
        with pytest.raises(FlexQuantError, match="cells.jsonl, line 2 is not a cell; correct or delete it"):
            read(tmp_path)
    assert (tmp_path / CELLS).read_bytes() == before


def test_a_failed_cell_is_kept_but_not_found(tmp_path):
    results = Results(tmp_path, "tiny", "abc")
    failed = results.save("kernels", PARAMETERS, 1, failure="no answer within 1 s")
    assert results.find("kernels", PARAMETERS) is None
    assert Results(tmp_path, "tiny", "abc").find("kernels", PARAMETERS) is None
    assert read_cells(tmp_path) == [failed]
    saved = results.save("kernels", PARAMETERS, 1, result={})
    assert results.find("kernels", PARAMETERS) == saved and read_cells(tmp_path) == [saved]


def test_the_newest_of_equal_cells_counts(tmp_path):
    results = Results(tmp_path, "tiny", "old")
    header = (tmp_path / CELLS).read_text()
    cell = results.save("kernels", PARAMETERS, 1, result=0)
    days = [{**cell, "finished": f"2026-01-0{day}T00:00:00Z", "result": day} for day in (2, 1)]
    (tmp_path / CELLS).write_text(header + "".join(json.dumps(day) + "\n" for day in days))
    assert [cell["result"] for cell in read_cells(tmp_path)] == [2]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (CELLS, "", "no readable cells.jsonl"),
        (CELLS, "{", "no readable cells.jsonl"),
        (CELLS, "[]\n", "no readable cells.jsonl"),
        (CELLS, '{"schema": "v9"}\n', "has schema 'v9'; only 'flexquant.speed/v2' is read"),
        (CELLS, None, "results of the model 'tiny', not 'small'; choose another"),
        ("thesis.tex", "x", "something else than speed results; choose another --output"),
    ],
)
def test_a_foreign_folder_is_refused_and_left_alone(tmp_path, file, text, message):
    if text is None:
        Results(tmp_path, "tiny", "abc")
    else:
        (tmp_path / file).write_text(text)
    before = (tmp_path / file).read_bytes()
    with pytest.raises(FlexQuantError, match=message):
        Results(tmp_path, "small", "abc")
    if file == CELLS and text is not None:
        with pytest.raises(FlexQuantError, match=message):
            read_header(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_bytes() == before


def test_commit_is_gits(tmp_path):
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = done.stdout.strip() if done.returncode == 0 else "unknown"
    assert Results(tmp_path, "tiny").environment["commit"].removesuffix("+changes") == expected
