# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The command line of `python -m benchmarks`, and the run that it describes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks.proof.proving import add_arguments
from benchmarks.speed.kernels import measure_kernels
from benchmarks.speed.live_policies import add_policies_arguments
from benchmarks.speed.models import open_model
from benchmarks.speed.peers import check_peer
from benchmarks.speed.results import Results
from benchmarks.speed.rounds import Plan
from benchmarks.speed.servers import ServerOptions
from benchmarks.speed.serving import ServingRun
from benchmarks.speed.settings import CPU, GPU, HEAD, LAYERS, PARTS, QUICK, Settings
from benchmarks.speed.subjects import FLEXQUANT, FLEXQUANT_ON, PEERS, STATIC, Subject, parse_subject
from benchmarks.speed.workloads import Workload
from flexquant.cli._arguments import add_effort, parse_names
from flexquant.errors import FlexQuantError

T = TypeVar("T")
SCHEMES = ("bf16", "w8a8", "w4a16", "fp8", "w8a16", "w4a8", "w4a8-fp8", "one-copy", "nested")
GPU_MEMORY = 0.9
"""Share of a GPU's memory that all servers together get."""


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=description,
        usage="python -m benchmarks --quick | run ... | report DIR | prove MODEL | policies URL ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="tables from the cells of a run")
    report.add_argument("output", type=Path, metavar="DIR", help="the --output of a run")
    add_arguments(commands.add_parser("prove", help="what FlexQuant claims, tried on this machine"))
    add_policies_arguments(commands.add_parser("policies", help="policies on one live server"))
    add = commands.add_parser("run", help="measure what is missing, then report").add_argument
    add("--quick", action="store_true", help="a first look: a small model and few cells, minutes on a CPU")
    add("--model", nargs="+", help="a synthetic model's name, or VARIANT=DIR for each checkpoint")
    add("--output", type=Path, metavar="DIR", help="results (default: benchmarks/results/MODEL)")
    add("--work", type=Path, default=Path(".work/benchmarks"), help="models and logs (default: %(default)s)")
    add("--parts", type=parse_names, default=PARTS, help=f"of {','.join(PARTS)}")
    add(
        "--subjects",
        type=parse_names,
        help=f"of {','.join(STATIC)},{FLEXQUANT}POLICY,{FLEXQUANT_ON}NAME:POLICY,"
        + ",".join(f"{peer}:QUANTISATION" for peer in PEERS),
    )
    add("--serving", nargs="+", metavar="REQUESTSxINPUT+OUTPUT[@RATE|/AT_ONCE][~SPREAD]", help="workloads")
    add_effort(add, "serving")
    add("--schemes", type=parse_names, help=f"kernels: of {','.join(SCHEMES)}, each also @KERNEL")
    add("--layers", type=parse_names, help=f"kernels: of {','.join(LAYERS)},{HEAD}")
    add("--tokens", type=parse_names, help="kernels: numbers of tokens, e.g. 1,16,256")
    add("--seconds", type=float, help="kernels: time for each cell")
    add("--time-limit", type=float, default=float("inf"), metavar="S", help="begin no cell after S seconds")
    add("--start-timeout", type=float, default=900, metavar="S", help="for a server (default: %(default)s)")
    add("--cell-timeout", type=float, default=300, metavar="S", help="for a cell (default: %(default)s)")
    add(
        "--kv-cache-gib", type=float, metavar="N", help="KV cache of each server; servers then start in pairs"
    )
    add("--memory-share", type=float, metavar="F", help="part of the GPU for each server (default: equal)")
    add(
        "--eager", action=argparse.BooleanOptionalAction, help="no compilation, no graphs (default: on a CPU)"
    )
    add(
        "--threads",
        type=int,
        metavar="N",
        help="of each server on a CPU (default: vLLM's, all cores but one)",
    )
    add("--server-args", type=str.split, default=[], metavar="'ARGS'", help="more arguments of vllm serve")
    add("--commit", help="the commit that is measured (default: git's)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure what is missing; return how many cells are left because time ran out.

    Sets ``args.output`` if it was not given. Raises FlexQuantError for what does not fit together.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    settings = choose_settings(args, on_gpu)
    for part in args.parts:
        _check(part, PARTS, "part")
    if args.model is None and not args.quick:
        raise FlexQuantError("no model is given; add --model, e.g. --model 0.5b, or try --quick")
    model = open_model(args.model or ["small"], args.work)
    args.output = args.output or Path("benchmarks/results") / ("quick" if args.quick else model.name)
    subjects = [parse_subject(name) for name in settings.subjects]
    plan = Plan(settings.serving, subjects, settings.effort)
    if "serving" in args.parts:
        for subject in subjects:
            if subject.peer is not None:
                check_peer(subject, on_gpu)
            if model.folders is not None:
                model.folder(subject)
    results = Results(args.output, model.name, args.commit)
    logs = args.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.time_limit
    left = 0
    if "kernels" in args.parts:
        left += measure_kernels(
            model,
            results,
            layers=settings.layers,
            tokens=settings.tokens,
            schemes=settings.schemes,
            seconds=settings.seconds,
            logs=logs,
            deadline=deadline,
            timeout=args.cell_timeout,
        )
    options = server_options(args, settings, subjects, on_gpu)
    if "serving" in args.parts:
        serving = ServingRun(
            model,
            results,
            options,
            logs,
            on_gpu=on_gpu,
            deadline=deadline,
            start_timeout=args.start_timeout,
            cell_timeout=args.cell_timeout,
        )
        left += serving.measure(plan)
    return left


def choose_settings(args: argparse.Namespace, on_gpu: bool) -> Settings:
    """Return the defaults for this machine, with what the command line replaces."""
    settings = QUICK if args.quick else GPU if on_gpu else CPU
    given = {
        "subjects": args.subjects,
        "schemes": _checked(args.schemes, SCHEMES, "scheme"),
        "layers": _checked(args.layers, (*LAYERS, HEAD), "layer"),
        "tokens": _each(args.tokens, _count),
        "serving": _each(args.serving, Workload.parse),
        "effort": settings.effort.changed(args.rounds, args.max_rounds, args.width),
        "seconds": args.seconds,
    }
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def server_options(
    args: argparse.Namespace, settings: Settings, subjects: list[Subject], on_gpu: bool
) -> ServerOptions:
    """Return how to serve, with room for the longest request and the largest batch that is planned."""
    return ServerOptions(
        max_length=max(w.longest for w in settings.serving),
        max_sequences=max(128, *(w.most_at_once for w in settings.serving if w.rate is None)),
        eager=not on_gpu if args.eager is None else args.eager,
        kv_cache_gib=args.kv_cache_gib if on_gpu else max(1, round(args.kv_cache_gib or 1)),
        memory_share=args.memory_share or GPU_MEMORY / len(subjects),
        extra=tuple(args.server_args),
        threads=args.threads,
    )


def _each(values: Iterable[str] | None, read: Callable[[str], T]) -> tuple[T, ...] | None:
    return None if values is None else tuple(read(value) for value in values)


def _checked(values: tuple[str, ...] | None, allowed: tuple[str, ...], what: str) -> tuple[str, ...] | None:
    for value in values or ():
        _check(value.partition("@")[0] if what == "scheme" else value, allowed, what)
    return values


def _check(value: str, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise FlexQuantError(f"'{value}' is not a {what}; choose from {', '.join(allowed)}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise FlexQuantError(
            f"'{text}' is not a number of tokens; give whole numbers of at least 1, e.g. 1,16,256"
        )
    return int(text)
