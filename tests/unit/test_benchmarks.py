# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' notes and refusals, order of cells, rounds that noise adds, and peers as subjects."""

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.benchmarks.lib import endpoint_request_func

from benchmarks.__main__ import main
from benchmarks.speed import peers
from benchmarks.speed.bench_client import BACKEND, bench, prompts_as_ids
from benchmarks.speed.comparing import pairs
from benchmarks.speed.kernels import has_stock_w4a8
from benchmarks.speed.models import Model, open_model
from benchmarks.speed.peers import check_peer, make_gguf, peer_arguments
from benchmarks.speed.results import Results
from benchmarks.speed.rounds import Plan
from benchmarks.speed.servers import ServerOptions
from benchmarks.speed.serving import STALLED, ServingRun, short_of_memory, stalled_seconds
from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.synthetic import write_checkpoint
from benchmarks.speed.workloads import Workload
from flexquant.errors import FlexQuantError
from flexquant.evaluation.comparison import Effort
from tests.checkpoints import make_checkpoint


def test_a_call_leaves_nothing_that_is_never_collected(tmp_path):
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


def test_measurements_that_were_disturbed_are_counted(tmp_path):
    (tmp_path / "memory").write_text(TOLD)
    assert stalled_seconds(tmp_path / "memory") == 186.911466
    assert stalled_seconds(tmp_path / "missing") == 0 and stalled_seconds() >= 0
    calm = {"duration": 2.0, STALLED: 0.01}
    assert short_of_memory([calm, {"duration": 2.0}]) == ""
    told = short_of_memory([calm, {"duration": 2.0, STALLED: 0.3}])
    assert told.startswith("In 1 of 2 measurements") and "fewer subjects" in told


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
        (["--model", "tiny", "--layers", "norm"], "'norm' is not a layer; choose from qkv_proj, "),
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
    code, error = command("run", *arguments, "--work", tmp_path / "work", "--output", tmp_path / "results")
    assert code == 1 and error.startswith("error: ") and error.count("\n") == 1
    assert message in error and list(tmp_path.iterdir()) == []


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


SMALL, LARGE = Workload(1, 8, 4), Workload(8, 8, 4)


def test_rounds_go_forward_and_backward():
    subjects = [parse_subject(name) for name in ("bf16", "w8a8", "flexquant:phase-batch")]
    plan = Plan([SMALL, LARGE], subjects, Effort(2, 2))
    names = [subject.name for subject in subjects]
    assert [(c.round, c.workload, c.subject.name) for c in plan.first] == [
        (number, workload, name)
        for number, order in ((0, names), (1, names[::-1]))
        for workload in (SMALL, LARGE)
        for name in order
    ]


def result(milliseconds: float) -> dict[str, float]:
    """Return the result of a server on which everything takes ``milliseconds``."""
    names = ("median_ttft_ms", "median_tpot_ms")
    return dict.fromkeys(names, milliseconds) | {"output_throughput": 1 / milliseconds}


def steady(number: int) -> float:
    return 1.0


def stalled_once(number: int) -> float:
    return 1.05 if number == 0 else 1.0


def noisy(number: int) -> float:
    return 1.1 if number % 2 else 0.9


@pytest.mark.parametrize(
    ("effort", "small", "large", "rounds"),
    [
        (Effort(6, 12), steady, steady, (6, 6)),
        (Effort(6, 12), steady, noisy, (6, 12)),
        (Effort(6, 12, width=0.5), steady, noisy, (6, 6)),
        # The interval of six rounds is as wide as the stall, 5 %; that of seven ends at half of it.
        (Effort(6, 12), stalled_once, steady, (7, 6)),
        (Effort(2, 2), noisy, noisy, (2, 2)),
    ],
)
def test_a_workload_gets_rounds_until_its_ratios_are_narrow_or_it_has_the_most(effort, small, large, rounds):
    """FlexQuant takes the workload's time in each round; the static subjects take 1."""
    subjects = [parse_subject(name) for name in ("w8a8", "w4a16", "flexquant:phase-batch")]
    times = {SMALL: small, LARGE: large}
    plan = Plan([*times], subjects, effort)
    found = {workload: {subject.name: {} for subject in subjects} for workload in times}

    def take(cells):
        for cell in cells:
            measured = found[cell.workload][cell.subject.name]
            assert cell.round == len(measured)
            time = times[cell.workload] if cell.subject.is_merged else steady
            measured[cell.round] = result(time(cell.round))

    take(plan.first)
    for cells in plan.added(lambda workload: found[workload]):
        take(cells)
    assert tuple(len(found[workload]["w8a8"]) for workload in times) == rounds


def left(folder: Path, rounds: int, times: Callable[[int], float], *more: str) -> int:
    """Return how many cells a run without time leaves from ``rounds`` on; subjects ``more`` have none."""
    plan = Plan([SMALL], [parse_subject(name) for name in ("w8a8", "flexquant:phase", *more)], Effort(6, 8))
    model = Model("tiny", SHAPES["tiny"], None, folder / "work")
    options = ServerOptions(64, 8, eager=True, kv_cache_gib=1, memory_share=0.5)
    timeouts = {"deadline": 0.0, "start_timeout": 1.0, "cell_timeout": 1.0}
    results = Results(folder / "results", "tiny", "abc")
    run = ServingRun(model, results, options, folder, on_gpu=False, **timeouts)
    for number in range(rounds):
        for cell in plan.cells(SMALL, number):
            if cell.subject.name not in more:
                time = times if cell.subject.is_merged else steady
                results.save("serving", run._parameters(cell), 1, result=result(time(number)))
    return run.measure(plan)


@pytest.mark.parametrize(
    ("rounds", "times", "cells"),
    [(0, noisy, 12), (5, noisy, 2), (6, noisy, 2), (7, noisy, 2), (8, noisy, 0), (9, noisy, 0)]
    + [(6, steady, 0), (6, stalled_once, 2), (7, stalled_once, 0)],
)
def test_a_run_goes_on_with_the_rounds_that_are_there(tmp_path, rounds, times, cells):
    """The first six rounds in any case; then one at a time, two cells each, until there are eight."""
    assert left(tmp_path, rounds, times) == cells


@pytest.mark.parametrize("subject", ["w4a8", "w4a16"])
def test_a_subject_that_cannot_run_here_is_not_waited_for(tmp_path, subject):
    can_run = subject != "w4a8" or has_stock_w4a8()  # with AMX or zentorch
    assert left(tmp_path, 6, steady, subject) == (6 if can_run else 0)


LLAMA_CPP, OPENVINO = parse_subject("llama.cpp:Q4_0"), parse_subject("openvino:Q8_0")
OPTIONS = ServerOptions(2009, 128, eager=False, kv_cache_gib=1, memory_share=1, threads=2)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the peers' environment, which is not there yet."""
    monkeypatch.setattr(peers, "ENVIRONMENT", tmp_path / "peers")
    return tmp_path / "peers"


def test_peers_are_subjects_that_serve_the_16_bit_checkpoint(tmp_path):
    assert (LLAMA_CPP.peer, LLAMA_CPP.quantisation, LLAMA_CPP.checkpoint) == ("llama.cpp", "Q4_0", "bf16")
    assert OPENVINO.describe() == {"subject": "openvino:Q8_0"}
    model = open_model(["tiny"], tmp_path)
    assert model.folder(LLAMA_CPP) == model.folder(parse_subject("bf16"))
    names = ["flexquant:phase", "flexquant:w8a8", "w8a8", LLAMA_CPP.name]
    assert pairs(names) == [("flexquant:phase", "w8a8"), ("flexquant:phase", "llama.cpp:Q4_0")]


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp:Q3_K", "openvino:", "openvino:w8a8"])
def test_an_unknown_quantisation_is_named_with_the_allowed_ones(name):
    peer = name.partition(":")[0]
    with pytest.raises(FlexQuantError, match=f"'{name}' does not name a quantisation; .*{peer}:Q8_0"):
        parse_subject(name)


def test_a_peer_that_is_not_set_up_or_does_not_fit_is_refused(environment):
    missing = "'openvino:Q8_0' needs .*peers, .*run `make .venv/peers/.done`, or leave openvino:Q8_0 out"
    with pytest.raises(FlexQuantError, match=missing):
        check_peer(OPENVINO, on_gpu=False)
    (environment / "lib/python3.11/site-packages/openvino_genai-2026.4.1.0.dist-info").mkdir(parents=True)
    with pytest.raises(FlexQuantError, match=missing):
        check_peer(OPENVINO, on_gpu=False)
    (environment / ".done").touch()
    assert check_peer(OPENVINO, on_gpu=False) == "openvino_genai-2026.4.1.0"
    with pytest.raises(FlexQuantError, match="on CPUs only, .*leave openvino:Q8_0 out"):
        check_peer(OPENVINO, on_gpu=True)


def test_peers_have_the_threads_and_the_kv_cache_of_vllms_worker():
    bytes_of_a_sequence = SHAPES["0.5b"].kv_bytes_per_token * 2048
    command = peer_arguments(LLAMA_CPP, Path("Q4_0.gguf"), OPTIONS, SHAPES["0.5b"], 80)
    told = dict(zip(command[4::2], command[5::2], strict=True))
    assert told["--model"] == "Q4_0.gguf" and told["--flash-attn"] == "on"
    assert told["--sse-ping-interval"] == "-1"
    assert told["--threads"] == "2" and told["--cpu-range"] == "0-1"
    assert int(told["--parallel"]) == 2**30 // bytes_of_a_sequence
    assert int(told["--ctx-size"]) == int(told["--parallel"]) * 2048
    command = peer_arguments(OPENVINO, Path("Q8_0.gguf"), OPTIONS, SHAPES["0.5b"], 80)
    told = dict(zip(command[2::2], command[3::2], strict=True))
    assert told["--threads"] == "2" and told["--cache-gib"] == "1" and told["--max-length"] == "2009"
    assert OPTIONS.environment(parse_subject("w8a8"))["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_a_model_that_cannot_be_converted_is_named_with_what_was_said(environment, tmp_path):
    (environment / "llama_cpp_python-0.3.36/vendor/llama.cpp").mkdir(parents=True)
    write_checkpoint(tmp_path / "model", SHAPES["tiny"], "bf16")
    said = r"does not make .*F16.gguf of this model: .*gguf.*; leave llama.cpp:Q4_0 out of --subjects"
    with pytest.raises(FlexQuantError, match=said):
        make_gguf(tmp_path / "model", LLAMA_CPP, tmp_path / "gguf")


def test_gguf_files_are_made_once_and_those_of_another_model_are_refused(tmp_path):
    for name in ("model", "other"):
        write_checkpoint(tmp_path / name, SHAPES["tiny"], "bf16")
    (tmp_path / "gguf").mkdir()
    for name in ("F16", "Q4_0"):
        (tmp_path / "gguf" / f"{name}.gguf").touch()
    assert make_gguf(tmp_path / "model", LLAMA_CPP, tmp_path / "gguf") == tmp_path / "gguf/Q4_0.gguf"
    with pytest.raises(FlexQuantError, match="GGUF files of another model than .*other is now; delete it"):
        make_gguf(tmp_path / "other", LLAMA_CPP, tmp_path / "gguf")


@dataclass
class Request:
    prompt: Any
    output_len: int


def test_prompts_go_out_as_the_models_token_ids(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "model", scheme=None)
    asked = []

    async def ask(request: Request, session: None) -> Any:
        asked.append(request.prompt)
        return type("Answer", (), {"output_tokens": None})()

    monkeypatch.setitem(endpoint_request_func.ASYNC_REQUEST_FUNCS, BACKEND, ask)
    with prompts_as_ids(str(folder)):
        ask_with_ids: Any = endpoint_request_func.ASYNC_REQUEST_FUNCS[BACKEND]
        answer = asyncio.run(ask_with_ids(Request("a text", 7), None))
    assert answer.output_tokens == 7 and asked and all(isinstance(token, int) for token in asked[0])
    assert endpoint_request_func.ASYNC_REQUEST_FUNCS[BACKEND] is ask
