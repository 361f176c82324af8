# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What does FlexQuant add before a request's first token? One engine exchanges its parts, request by request.

    python -m benchmarks.proof.first_token MERGED --output benchmarks/results/first-token-ab.json

Two servers differ by more than FlexQuant's own code takes: in cores, memory, and the order of their start. So
one engine serves one variant, and before each request takes one of two modes, in random order: *all* is
FlexQuant as it serves; in *vllm* vLLM's runner calls the plan itself, with vLLM's own metadata builders and
model state. Both run the same compiled plan and replay the same CUDA graphs. A request's time to the first
token, and to each later one, is taken by the clock and as CPU time of the engine's thread, which other
programs disturb less. The modes are compared request by request, in pairs of one round.

A checkpoint without tensors is served with dummy weights: times do not depend on them. On a GPU the runner
is the one that ``VLLM_USE_V2_MODEL_RUNNER`` chooses (1 or 0; without it, vLLM's own choice).

Without a GPU, ``--software-graphs V1`` records CUDA graphs in software, as the tests do; with
``TRITON_INTERPRET=1`` in the environment, ``--software-graphs V2`` runs vLLM's V2 runner.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.result import origin, write_result
from flexquant.evaluation.comparison import compare
from flexquant.evaluation.engine import engine, prepare_environment

if TYPE_CHECKING:
    from vllm import LLM

ALL, VLLM = "all", "vllm"
MODES = (ALL, VLLM)
LATER = 8
"""Tokens of an answer after the first."""
WARM_UP = 3


class Times(NamedTuple):
    """Milliseconds of one request, by the clock and of the engine's thread."""

    first: float
    later: float
    """Milliseconds of each token after the first."""
    first_cpu: float
    later_cpu: float


class Exchange:
    """Exchanges what of FlexQuant runs in an engine that lives in this process."""

    def __init__(self, llm: LLM, plan: str) -> None:
        """Prepare the modes; in VLLM every pass takes ``plan``."""
        (self._runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        served: list[Any] = llm.apply_model(lambda model: getattr(model, "runnable", model))
        (self._served,) = served
        self._plan = self._served.plans[plan]
        groups = (group for groups in self._runner.attn_groups for group in groups)
        observed = [builder for group in groups for builder in group.metadata_builders]
        if hasattr(self._runner, "model_state"):
            observed.append(self._runner.model_state)
        self._classes = [(thing, type(thing)) for thing in observed]

    def take(self, mode: str) -> None:
        """Serve in ``mode`` from the next request on; nothing may be running."""
        self._served.observer.settle()
        self._served.records.clock.end()
        model = self._plan if mode == VLLM else self._served
        if hasattr(self._runner.model, "runnable"):  # vLLM's wrapper for FULL graphs
            self._runner.model.runnable = model
        else:
            self._runner.model = model
        for thing, kind in self._classes:
            thing.__class__ = kind.__mro__[1] if mode == VLLM else kind


class Requests:
    """Sends one request after another to an engine, with random prompts."""

    def __init__(self, llm: LLM, tokens: int, seed: int = 0) -> None:
        """Send prompts of ``tokens`` tokens."""
        self._engine = llm.llm_engine
        self._tokens = tokens
        self._highest = min(1000, llm.model_config.get_vocab_size()) - 1
        self.random = random.Random(seed)
        self._sent = 0

    def send(self, answer: int = 1 + LATER) -> Times:
        """Return the times of a request for ``answer`` tokens."""
        from vllm import SamplingParams

        self._sent += 1
        prompt = [self.random.randint(5, self._highest) for _ in range(self._tokens)]
        parameters = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        began = time.perf_counter(), time.thread_time()
        first = None
        self._engine.add_request(f"{self._tokens}-{self._sent}", {"prompt_token_ids": prompt}, parameters)
        while self._engine.has_unfinished_requests():
            arrived = self._engine.step()
            if first is None and any(output.outputs[0].token_ids for output in arrived):
                first = time.perf_counter(), time.thread_time()
        ended = time.perf_counter(), time.thread_time()
        assert first is not None, "a request without an answer"
        (clock, cpu) = (
            (1000 * (middle - start), 1000 * (end - middle) / max(1, answer - 1))
            for start, middle, end in zip(began, first, ended, strict=True)
        )
        return Times(*clock, *cpu)


def exchange_by_request(
    requests: Requests, take: Callable[[str], None], modes: Sequence[str], rounds: int
) -> dict[str, list[Times]]:
    """Return each mode's times in ``rounds`` rounds, each of one request a mode in random order."""
    for mode in modes:
        take(mode)
        for _ in range(WARM_UP):
            requests.send()
    times: dict[str, list[Times]] = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in requests.random.sample(modes, len(modes)):
            take(mode)
            times[mode].append(requests.send())
    return times


def difference(times: Sequence[Times], base: Sequence[Times], what: str) -> dict[str, float]:
    """Return by how many ms ``times`` exceed ``base``, in pairs, with the ends of the 95 % interval."""
    seconds = [(getattr(a, what) - getattr(b, what)) / 1000 for a, b in zip(times, base, strict=True)]
    found = compare([math.exp(difference) for difference in seconds])  # which compares logarithms
    ends = {"ms": found.ratio, "low": found.low, "high": found.high}
    return {name: round(1000 * math.log(value), 4) for name, value in ends.items()}


def describe(times: dict[str, list[Times]]) -> dict[str, Any]:
    """Return each mode's medians, and what it takes beyond VLLM."""
    return {
        mode: {
            what: {
                "median_ms": round(statistics.median(getattr(sample, what) for sample in samples), 4),
                **({"beyond_vllm": difference(samples, times[VLLM], what)} if mode != VLLM else {}),
            }
            for what in Times._fields
        }
        for mode, samples in times.items()
    }


@contextmanager
def chosen_engine(folder: Path, variant: str, runner: str | None, tokens: Sequence[int]) -> Iterator[LLM]:
    """Yield an engine that serves one variant in CUDA graphs; ``runner`` asks for graphs in software.

    Prompts are to have ``tokens`` tokens; there is a graph for each number.
    """
    options: dict[str, Any] = {"max_model_len": max(tokens) + 64, "enable_prefix_caching": False}
    if not any(folder.glob("*.safetensors")):
        options["load_format"] = "dummy"
    if runner is None:
        sizes = {"cudagraph_capture_sizes": sorted({1, 2, 4, 8, *tokens})}
        options |= {"max_num_seqs": 8, "compilation_config": sizes} if torch.cuda.is_available() else {}
        with engine(folder, flexquant={"policy": variant}, **options) as llm:
            yield llm
        return
    import pytest

    from tests.gpu import conftest, software_graphs

    if runner not in conftest.RUNNERS_HERE:
        chosen = "TRITON_INTERPRET=1" if not conftest.INTERPRETED else "no TRITON_INTERPRET"
        raise SystemExit(f"vLLM's {runner} runner needs {chosen} in the environment; start it so again")
    from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels

    provide_cpu_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        software_graphs.install(patch)
        with conftest.graph_engine(folder, runner, "FULL_AND_PIECEWISE", variant, **options) as llm:
            yield llm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--variant", default="w8a8", help="variant to serve alone (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[48], help="lengths of prompts (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=100, help="requests of each mode (%(default)s)")
    parser.add_argument("--software-graphs", choices=("V1", "V2"), help="runner to record CUDA graphs of")
    parser.add_argument("--label", default="now", help="what is measured, a key of the results (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to add to, by label and tokens")
    args = parser.parse_args()
    prepare_environment()
    results = json.loads(args.output.read_text()) if args.output.is_file() else {}
    with chosen_engine(args.model, args.variant, args.software_graphs, args.tokens) as llm:
        take = Exchange(llm, args.variant).take
        for tokens in args.tokens:
            requests = Requests(llm, tokens)
            found = describe(exchange_by_request(requests, take, MODES, args.rounds))
            run = {**origin("benchmarks.proof.first_token"), "rounds": args.rounds, "modes": found}
            results.setdefault(args.label, {})[f"{tokens} tokens"] = run
            write_result(args.output, results)
            print(json.dumps({f"{tokens} tokens": found}), flush=True)


if __name__ == "__main__":
    main()
