# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The steps of a proof in the order of what they are worth, each within its own time.

The first six answer, within fifteen minutes, the questions that matter. Whatever a step finds is written as
it is found, and the report after every step, so a proof that is cut off leaves what it answered. The same
command started again goes on where it stopped. On a CPU all steps run in miniature.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.proof.claims import QUESTIONS, judge
from benchmarks.proof.gpu import driver_problem, fitting, free_gib, server_gib, serving_options
from benchmarks.proof.live import VARIANTS, compare_by_vllms_choice, compare_on_a_large_shape, tries
from benchmarks.proof.outcomes import NOT_RUN, VARIABLE, read_outcomes
from benchmarks.proof.report import (
    DOCTOR,
    FIRST_TOKENS,
    LARGE,
    LIVE_POLICIES,
    PROOF,
    RIVAL_POLICIES,
    TESTS_FILE,
    read_document,
    read_found,
    shape_of,
    write_proof,
)
from benchmarks.proof.steps import (
    DONE,
    FAILED,
    LOG,
    OUT_OF_TIME,
    Outcome,
    append_step,
    read_steps,
    run_bounded,
)
from benchmarks.speed.models import Model, open_model
from benchmarks.speed.results import ROOT, Results
from benchmarks.speed.settings import HEAD
from benchmarks.speed.shapes import SHAPES
from benchmarks.speed.subjects import parse_subject
from examples.vllm_server import ProcessGroup
from flexquant.errors import FlexQuantError

ALONE = ["tests/gpu/test_w4a8_marlin.py", "tests/gpu/test_tune.py"]
"""Test files that have the GPU for themselves: W4A8 needs the memory, and tune times engines."""
ONE_COPY_TESTS = ["tests/gpu/test_one_copy.py"]
"""Tests that run while a server starts: kernels alone, and two small engines."""
HEAD_KERNELS = "bf16,w8a16@marlin,w8a16@machete,w8a16@humming"
MINIATURE_KERNELS = {
    "one-copy": "w8a8,w4a16,one-copy,nested,w4a16@TorchCPUInt4LinearKernel",
    "rivals": "bf16,w4a8",
}
KERNELS = {
    "one-copy": "w4a16,w8a8,one-copy,nested,w4a16@marlin,w4a16@machete,w4a16@humming,one-copy@humming",
    "rivals": "bf16,fp8,w4a8,w4a8-fp8@cutlass,w4a8-fp8@humming,w4a8@humming,w8a8@humming,fp8@humming",
}
"""Schemes of the linear layers that are timed; at most eight, which the measuring process holds at once."""
TOKENS = "1,32,128,512,2048,8192"
LARGE_SHAPE = "qwen2.5-32b"
RUNNERS = {"V1": "0", "V2": "1"}
"""vLLM's model runners -> VLLM_USE_V2_MODEL_RUNNER."""
FIRST_TOKEN_SHAPES = ("1.5b", "0.5b", "small")
"""Shapes to take, the largest first, if the proof's own does not fit."""
DOCTORED = "flexquant:phase-batch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="+", help="a synthetic model's name, or VARIANT=DIR for each checkpoint"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="(default: benchmarks/results/MODEL-proof)"
    )
    parser.add_argument("--work", type=Path, default=Path(".work/benchmarks"), help="models and logs")
    parser.add_argument("--minutes", type=float, default=30, help="time for the proof (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="test processes (default: three for every four cores)")
    parser.add_argument("--commit", help="the commit that is measured (default: git's)")


@dataclass(frozen=True)
class Proof:
    """What is proved, and where."""

    model: Model
    names: list[str]
    """The model as it was given."""
    output: Path
    log: Path
    """File that receives what commands print."""
    commit: str | None
    on_gpu: bool
    processes: int

    @property
    def arguments(self) -> list[str]:
        """The model, output and commit as arguments of `benchmarks run`."""
        found = ["--model", *self.names, "--output", str(self.output), "--work", str(self.model.work)]
        return [*found, "--commit", self.commit] if self.commit else found


class Step(NamedTuple):
    """One step of a proof."""

    name: str
    seconds: float
    """The most that it takes on a GPU."""
    run: Callable[[Proof, float], Outcome]


def kernels(schemes: str, proof: Proof, seconds: float) -> Outcome:
    """Time a list of KERNELS at the proof's model."""
    if proof.on_gpu:
        some = ["--schemes", KERNELS[schemes], "--tokens", TOKENS]
    else:
        some = ["--schemes", MINIATURE_KERNELS[schemes], "--tokens", "4", "--layers", "o_proj"]
    return measure(proof, ["--parts", "kernels", "--seconds", "0.1", *some], seconds)


def kernels_at_large_shape(proof: Proof, seconds: float) -> Outcome:
    """Time the kernels of one copy at the shape of a large model, into a folder of their own."""
    shape = LARGE_SHAPE if proof.on_gpu else "tiny"
    return kernels("one-copy", replace(proof, names=[shape], output=proof.output / LARGE), seconds)


def kernels_of_the_head(proof: Proof, seconds: float) -> Outcome:
    """Time an lm_head in 16 bit and in INT8, for as many sequences as decode."""
    schemes, tokens = (HEAD_KERNELS, "1,8,32,128") if proof.on_gpu else ("bf16,w8a16", "4")
    head = ["--layers", HEAD, "--schemes", schemes, "--tokens", tokens]
    return measure(proof, ["--parts", "kernels", "--seconds", "0.1", *head], seconds)


def first_token(runner: str, proof: Proof, seconds: float) -> Outcome:
    """Exchange FlexQuant and vLLM's own call of the same plan in one engine, request by request."""
    name = proof.model.name
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]}
    if proof.on_gpu:
        model, note = model_that_fits(proof.model, proof.output), ""
        arguments = ["--tokens", "128", "512", "--rounds", "50"]
        note = "" if model.name == name else f"{name} does not fit into {free_gib():.0f} GiB: "
    else:
        model, note = proof.model, ""
        arguments = ["--software-graphs", runner, "--tokens", "12", "--rounds", "3"]
        environment |= {"TRITON_INTERPRET": "1"} if runner == "V2" else {}
    folder = model.without_weights(VARIANTS)
    command = [sys.executable, "-m", "benchmarks.proof.first_token", folder, "--label", runner]
    found = run_bounded(
        [*command, *arguments, "--output", (proof.output / FIRST_TOKENS).absolute()],
        seconds,
        environment,
        proof.log,
    )
    return found._replace(note=f"{note}{model.name}, dummy weights {found.note}".strip())


def model_that_fits(model: Model, output: Path) -> Model:
    """Return the model, or the largest of FIRST_TOKEN_SHAPES whose W8A8 variant fits into the GPU."""
    free = free_gib()
    if server_gib(model.shape, 1.0, 1.0) <= free:
        return model
    for name in fitting(FIRST_TOKEN_SHAPES, free, 1.0, 1024):
        return Model(name, SHAPES[name], None, model.work)
    raise FlexQuantError(
        f"the GPU has {free:.1f} GiB of free memory, too little for {', '.join(FIRST_TOKEN_SHAPES)}; end "
        "what else runs on it"
    )


def policies(proof: Proof, seconds: float) -> Outcome:
    """Compare policies on one server; the tests of one copy run while it starts."""
    options = ["--numprocesses", "4", "--dist", "loadgroup"] if proof.on_gpu else []

    def start_tests() -> ProcessGroup:
        command, environment = tests_command(proof.output / TESTS_FILE, [*ONE_COPY_TESTS, *options])
        log = proof.output / "tests-of-one-copy.txt"
        return ProcessGroup(command, log, environment, ROOT)

    output = proof.output / LIVE_POLICIES
    return compare_on_a_large_shape(output, proof.model.work, proof.on_gpu, seconds, start_tests)


def w4a16_by_vllms_choice(proof: Proof, seconds: float) -> Outcome:
    """Compare the static variants at the shape that the step of policies took, or the largest that fits."""
    shape = shape_of(read_document(proof.output / LIVE_POLICIES))
    if shape not in SHAPES:
        shapes = [shape for shape, _ in tries(free_gib())] if proof.on_gpu else ["tiny"]
        if not shapes:
            return Outcome(FAILED, "the GPU's free memory holds no shape")
        shape = shapes[0]
    output = proof.output / RIVAL_POLICIES
    return compare_by_vllms_choice(output, shape, proof.model.work, proof.on_gpu, seconds)


def tests_together(proof: Proof, seconds: float) -> Outcome:
    if not proof.on_gpu:
        return Outcome(DONE, "software graphs are tested by `make test`")
    options = ["--numprocesses", str(proof.processes), *(f"--ignore={file}" for file in ALONE)]
    return run_tests(proof.output / TESTS_FILE, ["tests/gpu", *options], seconds)


def tests_left(proof: Proof, seconds: float) -> Outcome:
    outcomes = read_outcomes(proof.output / TESTS_FILE).values()
    if not any(outcome["outcome"] == NOT_RUN for outcome in outcomes):
        return Outcome(DONE, "none is left")
    return tests_together(proof, seconds)


def tests_alone(proof: Proof, seconds: float) -> Outcome:
    return run_tests(proof.output / TESTS_FILE, ALONE, seconds)


def run_tests(file: Path, arguments: list[str], seconds: float) -> Outcome:
    """Run those tests that have not passed yet; the step is done when each has an outcome."""
    command, environment = tests_command(file, arguments)
    found = run_bounded(command, seconds, environment, file.with_name(LOG))
    left = sum(outcome["outcome"] == NOT_RUN for outcome in read_outcomes(file).values())
    if found.state == OUT_OF_TIME:
        return found._replace(note=f"{left} tests have no outcome yet")
    return Outcome(DONE, found.note) if read_outcomes(file) else Outcome(FAILED, f"see {LOG}")


def tests_command(file: Path, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command, with its environment, that runs tests and appends their outcomes to ``file``."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "benchmarks.proof.outcomes"]
    return [*command, *arguments], {**os.environ, VARIABLE: str(file.absolute())}


def servers(proof: Proof, seconds: float) -> Outcome:
    return measure(proof, serving_options(proof.model, proof.on_gpu), seconds)


def doctor(proof: Proof, seconds: float) -> Outcome:
    """Ask ``flexquant doctor`` about the merged checkpoint; make that if the servers did not."""
    folder, file = proof.model.folder(parse_subject(DOCTORED)), proof.output / DOCTOR
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "flexquant", "doctor", folder]
    return run_bounded(command, seconds, os.environ, file)


def measure(proof: Proof, options: list[str], seconds: float) -> Outcome:
    """Run a part of the speed benchmarks, which begins no cell shortly before ``seconds`` have passed."""
    limits = ["--time-limit", f"{0.75 * seconds:.0f}", "--start-timeout", f"{0.6 * seconds:.0f}"]
    limits += ["--cell-timeout", f"{0.6 * seconds:.0f}"]
    command = [sys.executable, "-m", "benchmarks", "run", *proof.arguments, *options, *limits]
    return run_bounded(command, seconds, os.environ, proof.log)


STEPS = (
    Step("kernels of one copy at a large shape", 150, kernels_at_large_shape),
    Step("policies at a large shape", 330, policies),
    Step("w4a16 by vLLM's choice", 190, w4a16_by_vllms_choice),
    Step("first token, V2 runner", 110, functools.partial(first_token, "V2")),
    Step("tests", 115, tests_together),
    Step("kernels of one copy", 150, functools.partial(kernels, "one-copy")),
    Step("first token, V1 runner", 90, functools.partial(first_token, "V1")),
    Step("kernels of the head", 60, kernels_of_the_head),
    Step("tests with the GPU for themselves", 310, tests_alone),
    Step("kernels", 160, functools.partial(kernels, "rivals")),
    Step("tests that are left", 130, tests_left),
    Step("servers side by side", 450, servers),
    Step("doctor", 40, doctor),
)
"""The first five are to be done in fifteen minutes. In the first one Humming compiles its programs for the
large shape, about 15 s for each linear; the live server finds them compiled."""


def prove(args: argparse.Namespace) -> Path:
    """Take the steps for which there is time; return the report.

    Raises FlexQuantError for a wrong model, and for a GPU that this PyTorch cannot use.
    """
    import torch

    began = time.monotonic()
    if problem := driver_problem(torch.version.cuda):
        raise FlexQuantError(problem)
    on_gpu = torch.cuda.is_available()
    model = open_model(args.model, args.work)
    output = args.output or Path("benchmarks/results") / f"{model.name}-proof"
    where = Results(output, model.name, args.commit).environment
    processes = args.processes or max(1, (os.cpu_count() or 1) * 3 // 4)
    proof = Proof(model, args.model, output, output / LOG, args.commit, on_gpu, processes)
    limits = {step.name: step.seconds for step in STEPS}
    write_proof(output, limits)
    for step in STEPS:
        left = began + 60 * args.minutes - time.monotonic()
        if is_done(output, step.name, where) or left < 1:
            continue
        take(step, proof, min(left, step.seconds) if on_gpu else left, where)
        write_proof(output, limits)
    return output / PROOF


def is_done(output: Path, name: str, where: dict[str, Any]) -> bool:
    """Return whether a step is done, of this commit and on this machine."""
    taken = read_steps(output).get(name, {})
    return taken.get("state") == DONE and all(taken[key] == value for key, value in where.items())


def take(step: Step, proof: Proof, seconds: float, where: dict[str, Any]) -> None:
    """Take a step, and write and print what it changed; a step that raises ends by itself alone."""
    print(f"== {step.name}: {seconds:.0f} s", flush=True)
    before, began = judge(read_found(proof.output)), time.monotonic()
    try:
        outcome = step.run(proof, seconds)
    except Exception as e:
        outcome = Outcome(FAILED, f"{type(e).__name__}: {e}")
    append_step(proof.output, step.name, outcome, time.monotonic() - began, where)
    print(f"== {step.name}: {outcome.state} {outcome.note}".rstrip(), flush=True)
    after = judge(read_found(proof.output))
    for question in QUESTIONS:
        for verdict in after[question]:
            if verdict not in before[question]:
                print(f"   {verdict.verdict}: {verdict.claim}; {verdict.evidence}", flush=True)
