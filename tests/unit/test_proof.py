# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a proof says of its claims; what fits into the GPU, its steps, and that what was found is not lost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proof import claims
from benchmarks.proof.claims import CONTRADICTED, COPY, FIRST_TOKEN, LIVE, NOT_SHOWN, SERVERS, SHOWN, TESTS
from benchmarks.proof.gpu import SERVING, fitting_subjects, kv_cache_gib, most_tokens, server_gib
from benchmarks.proof.live import LINEUPS, PLAIN, W4A8, tries
from benchmarks.proof.outcomes import FAILED, NOT_RUN, PASSED, SKIPPED, VARIABLE, read_outcomes
from benchmarks.proof.proving import HEAD_KERNELS, KERNELS, MINIATURE_KERNELS, STEPS
from benchmarks.proof.report import LARGE, LIVE_POLICIES, PROOF, RIVAL_POLICIES, read_found, write_proof
from benchmarks.proof.steps import DONE, OUT_OF_TIME, Outcome, append_step, read_steps, run_bounded
from benchmarks.speed.command_line import choose_settings, make_parser
from benchmarks.speed.page_tables import gpu_live
from benchmarks.speed.results import Results
from benchmarks.speed.shapes import SHAPES
from flexquant.evaluation.comparison import compare
from flexquant.policy.rules import load_policy

ALONE, BATCH, _ = SERVING
GRAPHS = claims.TESTED["test_graph_modes.py"]
ONE, OTHER = "tests/gpu/test_graph_modes.py::test_a[V1-x]", "tests/gpu/test_graph_modes.py::test_b[V1]"


def verdict(question: str, claim: str, outcomes: Any = None, **found: Any) -> claims.Verdict:
    nothing = {"cells": (), "first_tokens": {}, "live": {}, "rival": {}, "large": ()}
    found = claims.Found(outcomes or {}, **nothing | found)
    (one,) = [verdict for verdict in claims.judge(found)[question] if claim in verdict.claim]
    return one


@pytest.mark.parametrize(
    ("outcomes", "unfinished", "expected"),
    [
        ([], [], NOT_SHOWN),
        ([PASSED, PASSED], [], SHOWN),
        ([PASSED, SKIPPED], [], SHOWN),
        ([SKIPPED, SKIPPED], [], NOT_SHOWN),
        ([PASSED], [OTHER], NOT_SHOWN),
        ([FAILED], [OTHER], CONTRADICTED),
        ([PASSED, PASSED], ["tests/gpu/test_tune.py::test_c"], SHOWN),
    ],
)
def test_a_claim_of_tests_is_shown_by_all_and_contradicted_by_one(outcomes, unfinished, expected):
    found = {test: {"outcome": outcome} for test, outcome in zip((ONE, OTHER), outcomes, strict=False)}
    found |= {test: {"outcome": NOT_RUN} for test in unfinished}
    assert verdict(TESTS, GRAPHS, found).verdict == expected
    assert verdict(TESTS, claims.TESTED["test_tune.py"], found).verdict == NOT_SHOWN
    assert verdict(TESTS, "V1 runner", found).verdict == (NOT_SHOWN if ONE not in found else expected)
    assert verdict(TESTS, "V2 runner", found).verdict == NOT_SHOWN


def rounds(times: list[float]) -> list[dict[str, Any]]:
    """Return results in which all times, ms, are the round's, and the rate is the inverse."""
    names = "ttfts", "tpots", "median_ttft_ms", "median_tpot_ms", "output_throughput"
    each = ([[time / 1000], [time / 1000], time, time, 1000 / time] for time in times)
    return [dict(zip(names, values, strict=True)) for values in each]


def cells(workload: Any, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    found = []
    for subject, of_rounds in times.items():
        for number, result in enumerate(rounds(of_rounds)):
            parameters = {"workload": workload.describe(), "subject": subject, "round": number}
            found.append({"part": "serving", "parameters": parameters, "result": result})
    return found


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1.0, 1.01, 1.02, 0.99, 1.0, 1.02], SHOWN),
        ([1.0, 1.01, 1.2, 0.99, 1.0, 1.02], NOT_SHOWN),
        ([1.1, 1.2, 1.1, 1.05, 1.3, 1.04], CONTRADICTED),
        ([1.0, 1.0, 1.0, 1.0], NOT_SHOWN),
    ],
)
def test_equality_is_shown_within_three_percent_by_five_rounds(times, expected):
    static = [1.0] * len(times)
    decode = cells(ALONE, {"w4a16": static, "flexquant:phase-batch": times})
    assert verdict(SERVERS, "at the pace of static W4A16", cells=decode).verdict == expected
    assert verdict(SERVERS, "at the pace of static W4A16").evidence == "not measured"
    words = compare(times).words()
    assert verdict(SERVERS, "at the pace of static W4A16", cells=decode).evidence.endswith(f"), {words}")
    prefill = cells(BATCH, {"w8a8": static, "flexquant:phase-batch": times})
    assert verdict(SERVERS, "has its first tokens", cells=prefill).verdict == expected


@pytest.mark.parametrize(("milliseconds", "expected"), [(0.9, SHOWN), (1.0, NOT_SHOWN), (1.1, CONTRADICTED)])
@pytest.mark.parametrize(
    ("claim", "static", "policy"),
    [
        ("more tokens a second than under static W8A8", "w8a8", "flexquant:phase-batch"),
        ("prefills a batch sooner than static W4A16", "w4a16", "flexquant:one-copy"),
    ],
)
def test_a_gain_is_shown_beyond_the_interval_by_both_servers(claim, static, policy, milliseconds, expected):
    both = {static: [1.0] * 6, policy: [milliseconds] * 6}
    assert verdict(SERVERS, claim, cells=cells(BATCH, both)).verdict == expected
    if expected == SHOWN and static == "w8a8":  # a second server that is slower takes the certainty
        again = both | {"w8a8:again": [1.2] * 6}
        assert verdict(SERVERS, claim, cells=cells(BATCH, again)).verdict == NOT_SHOWN


@pytest.mark.parametrize(("milliseconds", "expected"), [(0.6, SHOWN), (1.0, NOT_SHOWN), (1.1, CONTRADICTED)])
def test_policies_on_one_server_are_judged_by_their_rounds(milliseconds, expected):
    static, routed = rounds([1.0] * 5), rounds([milliseconds] * 5)
    live = {ALONE.name: {"w8a8": static, "w4a16": static, "phase-batch": routed}}
    assert verdict(LIVE, "a batch is decoded sooner", live=live).evidence == "not measured"
    assert verdict(LIVE, "one sequence is decoded sooner", live=live).verdict == expected
    cut_off = {ALONE.name: {"w8a8": static[:4], "w4a16": [], "phase-batch": routed[:4]}}
    assert verdict(LIVE, "one sequence is decoded sooner", live=cut_off).verdict == NOT_SHOWN


@pytest.mark.parametrize(
    ("routed", "w8a8_there", "w4a16_there", "expected"),
    [
        (0.9, 1.0, 1.0, SHOWN),
        (1.1, 1.0, 1.0, CONTRADICTED),
        (1.1, 0.5, 0.5, CONTRADICTED),  # the second server is faster in all, as its W8A8 shows
        (1.1, 0.8, 1.0, SHOWN),
        (0.9, 1.2, 1.0, CONTRADICTED),
        (1.0, 1.0, 1.0, NOT_SHOWN),
    ],
)
def test_w8a8_relates_a_policy_to_w4a16_of_a_second_server(routed, w8a8_there, w4a16_there, expected):
    live = {BATCH.name: {"w8a8": rounds([1.0] * 5), "phase-batch": rounds([routed] * 5)}}
    rival = {BATCH.name: {"w8a8": rounds([w8a8_there] * 5), "w4a16": rounds([w4a16_there] * 5)}}
    claim = "more tokens a second than W4A16 by the kernel"
    assert verdict(LIVE, claim, live=live, rival=rival).verdict == expected
    assert verdict(LIVE, claim, live=live).evidence == "not measured"
    assert verdict(LIVE, "decoded at the pace of W4A16 by", live=live, rival=rival).evidence == "not measured"


@pytest.mark.parametrize(
    ("low", "high", "rounds", "expected"),
    [(-0.1, 0.2, 100, SHOWN), (0.1, 0.5, 100, NOT_SHOWN)]
    + [(0.4, 0.9, 100, CONTRADICTED), (0, 0.1, 29, NOT_SHOWN)],
)
def test_a_first_token_may_come_three_percent_late(low, high, rounds, expected):
    own = {"median_ms": 10.1, "beyond_vllm": {"ms": 0.1, "low": low, "high": high}}
    vllm = {"median_ms": 10.0}
    modes = {"all": {"first": own, "later": own}, "vllm": {"first": vllm, "later": vllm}}
    measured = {"V2": {"128 tokens": {"rounds": rounds, "modes": modes}}}
    found = verdict(FIRST_TOKEN, "V2 runner: first token", first_tokens=measured)
    assert found.verdict == expected and "+0.100 ms" in found.evidence
    assert verdict(FIRST_TOKEN, "V1 runner: first token", first_tokens=measured).evidence == "not measured"


@pytest.mark.parametrize(
    "copy, expected", [((90, 85, 95), SHOWN), ((100, 95, 105), NOT_SHOWN), ((120, 115, 125), CONTRADICTED)]
)
def test_a_kernel_is_sooner_beyond_its_quartiles(copy, expected):
    def found(middle: float, low: float, high: float) -> dict[str, Any]:
        return {"microseconds": middle, "microseconds_quartiles": [low, high]}

    def cell(tokens: int, copied: tuple[int, int, int]) -> dict[str, Any]:
        sizes = {"layer": "o_proj", "outputs": 8, "inputs": 8, "tokens": tokens}
        result = {"one-copy": found(*copied), "w4a16": found(100, 98, 103)}
        return {"part": "kernels", "parameters": sizes, "result": result}

    measured = [cell(512, (500, 490, 510)), cell(2048, copy), cell(8192, (90, 85, 95))]
    here, large = "at the model's shape", "at a large model's shape"
    assert verdict(COPY, here, cells=measured).verdict == expected
    assert verdict(COPY, here, cells=measured[:1]).evidence == "not measured"
    assert verdict(COPY, here, large=measured).evidence == "not measured"
    assert verdict(COPY, large, large=measured).verdict == expected
    for faster in (cell(2048, copy), cell(8192, (90, 85, 95))):  # one kernel of W4A16 that is faster counts
        faster["result"] = {"w4a16@machete": found(80, 78, 82), "w4a16@marlin": found(400, 390, 410)}
        assert verdict(COPY, here, cells=[*measured, faster]).verdict == CONTRADICTED
        faster["parameters"] |= {"layer": "qkv_proj"}  # unless it runs only some of the layers
        assert verdict(COPY, here, cells=[*measured, faster]).verdict == expected


ROOT = Path(__file__).parents[2]
KERNEL = {"layer": "o_proj", "outputs": 8, "inputs": 8, "tokens": 2048}


def test_servers_side_by_side_are_as_many_as_fit_each_with_the_largest_workload():
    shape = SHAPES["llama-3.1-8b"]
    cache = kv_cache_gib(shape, most_tokens(SERVING))
    assert cache * 2**30 / shape.kv_bytes_per_token == pytest.approx(1.1 * 24 * (512 + 64) * 1.5, rel=0.01)
    on_80_gb, on_24_gb = (fitting_subjects(shape, cache, free) for free in (78, 23))
    assert on_80_gb[:5] == ["w8a8", "w4a16", "flexquant:phase-batch", "w8a8:again", "w4a16:again"]
    assert on_24_gb == ["w8a8"]
    assert server_gib(shape, 1.0, cache) > 6.5 + cache  # 8-bit weights of 7 billion linear parameters


@pytest.mark.parametrize(
    ("free", "first"),
    [(139, "qwen2.5-32b"), (78, "qwen2.5-32b"), (47, "qwen2.5-32b-32layers")]
    + [(23, "llama-3.1-8b"), (1, None)],
)
def test_the_next_smaller_shape_is_taken_where_memory_ends(free, first):
    assert next((shape for shape, _ in tries(free)), None) == first


@pytest.mark.parametrize(("free", "with_w4a8"), [(139, True), (78, True), (60, False)])
def test_w4a8_gives_way_first_then_one_copy_then_the_shape(free, with_w4a8):
    found = tries(free)
    of_largest = [lineup for shape, lineup in found if shape == "qwen2.5-32b"]
    assert of_largest == list(LINEUPS[0 if with_w4a8 else 1 :])
    assert [lineup for _, lineup in found[len(of_largest) :]] == [PLAIN] * (len(found) - len(of_largest))
    assert [W4A8 in lineup.policies for lineup in LINEUPS] == [True, False, False]
    assert ["one-copy" in lineup.policies for lineup in LINEUPS] == [True, True, False]


@pytest.mark.parametrize("lineup", LINEUPS)
def test_a_live_server_starts_with_a_policy_that_reaches_all_that_it_will_take(lineup):
    start = load_policy(lineup.start)
    for policy in map(load_policy, lineup.policies):
        assert set(policy.variants) <= set(start.variants)
        assert policy.derived == {name: start.derived[name] for name in policy.derived}


@pytest.mark.parametrize("schemes", [*KERNELS.values(), *MINIATURE_KERNELS.values(), HEAD_KERNELS])
def test_the_kernels_of_the_steps_are_ones_that_a_run_takes(schemes):
    args = make_parser("").parse_args(["run", "--schemes", schemes])
    assert choose_settings(args, on_gpu=True).schemes == tuple(schemes.split(","))
    assert len(choose_settings(args, on_gpu=True).schemes) <= 8  # as many as kernels.build_layers keeps


def test_the_first_steps_take_fifteen_minutes_and_all_but_two_take_thirty():
    assert sum(step.seconds for step in STEPS[:5]) <= 900
    assert sum(step.seconds for step in STEPS[:-2]) <= 1800
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.full
def test_policies_wait_at_a_gate_with_all_imported(tmp_path):
    gate = tmp_path / "gate"
    command = [sys.executable, "-m", "benchmarks", "policies", "http://127.0.0.1:1", "--gate", gate]
    command += ["--policy", "w8a8", "--policy", W4A8, "--serving", "1x16+2"]
    command += ["--output", tmp_path / "live.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == "waits for gate\n" and run.poll() is None
        gate.touch()
        assert run.wait(60) == 1 and "http://127.0.0.1:1 names no model" in run.stderr.read()


def test_a_second_server_counts_if_it_had_the_same_shape(tmp_path):
    folder = tmp_path / "proof"
    Results(folder, "tiny", "0123456789ab")
    cells = {BATCH.name: {name: rounds([1.0] * 5) for name in ("w8a8", "w4a16", "w4a8-fp8", "phase-batch")}}
    live = {"model": "tiny/without-weights", "cells": cells}
    (folder / LIVE_POLICIES).write_text(json.dumps(live))
    (folder / RIVAL_POLICIES).write_text(json.dumps(live | {"model": "1.5b/without-weights"}))
    assert read_found(folder).rival == {}
    (folder / RIVAL_POLICIES).write_text(json.dumps(live))
    assert read_found(folder).rival == cells
    Results(folder / LARGE, "small", "0123456789ab").save("kernels", KERNEL, 1.0, result={})
    assert len(read_found(folder).large) == 1
    assert write_proof(folder, {}).read_text().count("| `w4a8-fp8` | 1: ") == 2
    in_page = [row.split(" | ")[1] for row in gpu_live(str(folder)).splitlines()[2:]]
    first = ["`w4a16`", "`w4a8-fp8`", "`phase-batch`"]
    assert in_page == [*first, *(f"{name} by vLLM's choice" for name in first)]


def test_steps_are_written_as_they_end_and_commands_end_in_their_time(tmp_path):
    began = time.monotonic()
    slow = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    log = tmp_path / "log.txt"
    assert run_bounded(slow, 2, os.environ, log).state == OUT_OF_TIME and time.monotonic() - began < 60
    failed = run_bounded([sys.executable, "-c", "print(1); print(2); exit(3)"], 60, os.environ, log)
    assert failed.note == "ended with 3, log.txt ends: 2"
    append_step(tmp_path, "one", failed, 1.25, {"commit": "a"})
    append_step(tmp_path, "one", Outcome(DONE), 2, {"commit": "a"})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": "two", "st')
    assert read_steps(tmp_path) == {"one": {"state": DONE, "note": "", "seconds": 2, "commit": "a"}}


def test_a_report_is_there_before_anything_is_known_and_while_steps_are_under_way(tmp_path):
    folder = tmp_path / "proof"
    Results(folder, "tiny", "0123456789ab")
    (folder / "policies.json").write_text('{"cells": {"2x16+4": {"w8a8')  # ended while it wrote
    text = write_proof(folder, {step.name: step.seconds for step in STEPS}).read_text()
    assert text.count("**not shown**") == text.count("**") // 2 > 20
    assert text.count("| not begun |") == len(STEPS)
    assert [file.name for file in folder.iterdir() if file.name.startswith(PROOF[:5])] == [PROOF]


WRITTEN = """
import time
def test_good(): pass
def test_bad(): assert 1 == 2
def test_slow(): time.sleep(600)
"""


def test_outcomes_are_there_when_a_run_is_stopped_and_what_passed_is_not_run_again(tmp_path):
    (tmp_path / "test_it.py").write_text(WRITTEN)
    file = tmp_path / "tests.jsonl"

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.proof.outcomes", "--rootdir", ".", "."]
        environment = {**os.environ, VARIABLE: str(file), "PYTHONPATH": str(ROOT)}
        how = {"cwd": tmp_path, "env": environment, "stdout": subprocess.DEVNULL}
        return subprocess.Popen([*command, *arguments], **how)

    with start() as process:
        for _ in range(600):
            if [o["outcome"] for o in read_outcomes(file).values()].count(NOT_RUN) == 1:
                break
            time.sleep(0.1)
        process.kill()
    found = read_outcomes(file)
    outcomes = {"test_good": PASSED, "test_bad": FAILED, "test_slow": NOT_RUN}
    expected = {f"test_it.py::{test}": outcome for test, outcome in outcomes.items()}
    assert {test: o["outcome"] for test, o in found.items()} == expected
    assert "assert 1 == 2" in found["test_it.py::test_bad"]["reason"]
    with start("-k", "not slow") as process:
        assert process.wait(60) == 1
    lines = file.read_text().splitlines()
    ran = [line for line in lines if NOT_RUN not in line]
    assert len(lines) - len(ran) == 3
    assert [line.count("test_bad") > 0 for line in ran] == [False, True, True]


def test_a_line_cut_off_is_left_out(tmp_path):
    file = tmp_path / "tests.jsonl"
    file.write_text('{"test": "a", "outcome": "passed", "seconds": 1}\n{"test": "b", "ou')
    assert list(read_outcomes(file)) == ["a"] and read_outcomes(tmp_path / "none.jsonl") == {}
