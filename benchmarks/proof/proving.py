# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The steps of a proof, most valuable first, each within its part of the time; and the report of them.

Every step appends what it found as it finds it, so the same command started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from benchmarks.proof.claims import Verdict, judge
from benchmarks.proof.outcomes import PASSED, VARIABLE, read_outcomes
from benchmarks.speed.models import Model, open_model
from benchmarks.speed.report import write_report
from benchmarks.speed.results import ROOT, Results, read_cells, read_header
from benchmarks.speed.shapes import Shape
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.workloads import Workload
from benchmarks.table import markdown

TESTS = "tests.jsonl"
DOCTOR = "doctor.txt"
PROOF = "proof.md"
ALONE = "tests/gpu/test_tune.py"
"""The test file that runs by itself, since it times engines."""
TESTS_SHARE, SERVING_SHARE, DOCTOR_SHARE = 0.4, 0.45, 0.1
"""Shares of the time for these steps; the kernels have what is left."""
SERVING = [Workload(1, 128, 128), Workload(32, 512, 64), Workload(32, 512, 64, rate=16, spread=0.5)]
OVERHEAD = [Workload(1, 128, 128)]
MINIATURE = [Workload(1, 16, 4), Workload(2, 32, 4)]
MINIATURE_TESTS = ["tests/gpu/test_tune.py", "tests/gpu/test_w4a8_marlin.py"]
MINIATURE_KERNELS = ["--layers", "o_proj", "--tokens", "4", "--schemes", "bf16,w8a8,w4a16,one-copy"]
"""Arguments of the kernels on a CPU, where a proof only shows that proving works; these tests skip there."""
ONE_COPY = ["--parts", "kernels", "--schemes", "w4a16,w8a8,one-copy", "--tokens", "1,512,2048,8192"]
"""Arguments of the first step, which is short: INT8 from one copy of INT4 weights against both kernels."""
ONE_COPY_SHARE = 0.1
SUBJECTS = {
    "w8a8": 1.0,
    "w4a16": 0.55,
    "flexquant:phase-batch": 1.55,
    "flexquant:w8a8": 1.0,
    "flexquant:one-copy": 0.6,
    "bf16": 2.0,
}
"""Subjects that are served side by side, the most valuable first -> their bytes a weight."""
DOCTORED = "flexquant:phase-batch"
SERVER_GIB = 2.5
"""GiB that a server takes beside weights and KV cache: activations, CUDA graphs, CUDA itself."""

SECONDS_TO_END = 60
"""Seconds that a step gets to stop its servers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="+", help="a synthetic model's name, or VARIANT=DIR for each checkpoint"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="(default: benchmarks/results/MODEL-proof)"
    )
    parser.add_argument("--work", type=Path, default=Path(".work/benchmarks"), help="models and logs")
    parser.add_argument("--minutes", type=float, default=30, help="time for the proof (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="test processes (default: one for every two cores)")
    parser.add_argument("--commit", help="the commit that is measured (default: git's)")


def prove(args: argparse.Namespace) -> Path:
    """Take the steps for which there is time; return the report. Raises FlexQuantError for a wrong model."""
    import torch

    began = time.monotonic()
    on_gpu = torch.cuda.is_available()
    model = open_model(args.model, args.work)
    output = args.output or Path("benchmarks/results") / f"{model.name}-proof"
    Results(output, model.name, args.commit)
    seconds = 60 * args.minutes

    def left(share: float = 1.0) -> float:
        return max(1.0, min(seconds * share, began + seconds - time.monotonic()))

    processes = args.processes or max(1, (os.cpu_count() or 1) // 2)
    tests = ["tests/gpu"] if on_gpu else MINIATURE_TESTS
    options = ["--model", *args.model, "--output", str(output), "--work", str(args.work)]
    options += ["--commit", args.commit] if args.commit else []
    if on_gpu:
        step("one copy", [*options, *ONE_COPY, "--seconds", "0.1"], left(ONE_COPY_SHARE))
    unfinished = run_tests(output / TESTS, tests, processes if on_gpu else 0, left(TESTS_SHARE))
    serving = serving_options(model, on_gpu)
    step("servers", [*options, *serving], left(SERVING_SHARE))
    run_doctor(model, output / DOCTOR, left(DOCTOR_SHARE))
    kernels = ["--parts", "kernels", "--seconds", "0.1", *([] if on_gpu else MINIATURE_KERNELS)]
    step("kernels", [*options, *kernels], left())
    write_report(output)
    return write_proof(output, judge(read_outcomes(output / TESTS), unfinished, read_cells(output)))


def run_tests(file: Path, tests: list[str], processes: int, seconds: float) -> set[str]:
    """Run those of ``tests`` that have not passed yet; return those that have no outcome after that."""
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "benchmarks.proof.outcomes"]
    environment = {**os.environ, VARIABLE: str(file.absolute())}
    listed = subprocess.run(
        [*pytest, *tests, "--collect-only"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    missing = {line for line in listed.stdout.splitlines() if line.startswith("tests/gpu/")}
    print(f"tests: {len(missing)} have not passed yet, {seconds:.0f} s for them", flush=True)
    ends = time.monotonic() + seconds
    side_by_side = ["--numprocesses", str(processes), f"--ignore={ALONE}"] if processes else []
    for command in ([*pytest, *tests, *side_by_side], *([[*pytest, ALONE]] if processes else [])):
        _bounded(command, max(1.0, ends - time.monotonic()), environment, file.with_suffix(".log"))
    return missing - read_outcomes(file).keys()


def run_doctor(model: Model, file: Path, seconds: float) -> None:
    """Write what ``flexquant doctor`` says of the merged checkpoint; make that if the servers did not."""
    folder = model.folder(parse_subject(DOCTORED))
    print(f"doctor: {seconds:.0f} s", flush=True)
    file.unlink(missing_ok=True)
    _bounded([sys.executable, "-m", "flexquant", "doctor", str(folder)], seconds, dict(os.environ), file)


def serving_options(model: Model, on_gpu: bool) -> list[str]:
    """Return the arguments of the serving step: as many subjects as the GPU has memory for."""
    workloads = SERVING if on_gpu else MINIATURE
    cache = max(1.0, kv_cache_gib(model.shape, workloads))
    subjects = fitting_subjects(model.shape, cache) if on_gpu else list(SUBJECTS)[:4]
    return [
        *(
            "--parts",
            "serving,overhead",
            "--subjects",
            ",".join(subjects),
        ),
        *(("--rounds", "6", "--max-rounds", "20") if on_gpu else ("--rounds", "1")),
        *("--serving", *(workload.name for workload in workloads)),
        *("--overhead", *(workload.name for workload in (OVERHEAD if on_gpu else MINIATURE[:1]))),
        *("--kv-cache-gib", f"{cache:.2f}"),
    ]


def kv_cache_gib(shape: Shape, workloads: list[Workload]) -> float:
    """Return the size of a KV cache that holds every request of a workload at once, and a tenth more."""
    tokens = max(workload.requests * workload.longest for workload in workloads)
    return 1.1 * tokens * shape.kv_bytes_per_token / 2**30


def fitting_subjects(shape: Shape, cache: float) -> list[str]:
    """Return the subjects that fit into the GPU side by side, the most valuable ones first."""
    import torch

    free = 0.9 * torch.cuda.get_device_properties(0).total_memory / 2**30
    linear = shape.layers * sum(outputs * inputs for outputs, inputs in shape.projections().values())
    ends = (1 if shape.tied else 2) * 2 * shape.vocabulary * shape.hidden
    found = []
    for subject, bytes_a_weight in SUBJECTS.items():
        free -= (linear * bytes_a_weight + ends) / 2**30 + cache + SERVER_GIB
        if free < 0:
            break
        found.append(subject)
    return found


def step(name: str, options: list[str], seconds: float) -> None:
    """Run a part of the speed benchmarks, which begins no cell shortly before ``seconds`` have passed."""
    print(f"{name}: {seconds:.0f} s", flush=True)
    limits = ["--time-limit", f"{0.9 * seconds:.0f}", "--start-timeout", f"{0.7 * seconds:.0f}"]
    _bounded([sys.executable, "-m", "benchmarks", "run", *options, *limits], seconds, dict(os.environ))


def _bounded(
    command: list[str], seconds: float, environment: dict[str, str], log: Path | None = None
) -> None:
    """Run a command for at most ``seconds``, then ask it to end; it ends what it has started."""
    with open(log, "ab") if log else nullcontext() as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            print("out of time", flush=True)
        finally:
            process.terminate()
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_proof(output: Path, verdicts: list[Verdict]) -> Path:
    """Write the report: where it was made, and one line for each claim."""
    header, outcomes = read_header(output), read_outcomes(output / TESTS)
    machine, versions = header["machine"], " ".join(f"{k} {v}" for k, v in header["versions"].items())
    where = f"{machine['gpu'] or 'no GPU'}, {machine['cpu']}, {machine['cores']} cores"
    rows = [[verdict.claim, f"**{verdict.verdict}**", verdict.evidence] for verdict in verdicts]
    failures = [
        f"- `{test}`:\n\n```\n{o['reason']}\n```" for test, o in outcomes.items() if o["outcome"] == "failed"
    ]
    doctor = "\n".join(
        line
        for line in (output / DOCTOR).read_text(encoding="utf-8").splitlines()
        if line.startswith(("  ", "! ", "X "))
    )
    passed = sum(outcome["outcome"] == PASSED for outcome in outcomes.values())
    sections = [
        f"# What was shown on {machine['gpu'] or machine['cpu']}: {header['model']}",
        f"- machine: {where}\n- versions: {versions}\n- commit: {header['commit']}\n"
        f"- command: `{' '.join(header['argv'])}`\n"
        f"- tests/gpu: {passed} passed of {len(outcomes)} with an outcome",
        markdown(["claim", "verdict", "evidence"], rows),
        "Speed: ratios of paired rounds with their 95 % intervals; `python -m benchmarks report` and this "
        f"folder write all of them into report.md. Tests: [{TESTS}]({TESTS}).",
        *(["## What failed", *failures] if failures else []),
        f"## What `flexquant doctor` says of `{DOCTORED}`\n\n```\n{doctor}\n```",
    ]
    file = output / PROOF
    file.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return file
