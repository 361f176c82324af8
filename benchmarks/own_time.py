# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How long is FlexQuant's own Python in a pass, in microseconds, and how many calls is it?

    python -m benchmarks.own_time MERGED --output benchmarks/results/own-time.json

Own time is what passes in FlexQuant's model and metadata builders, less what passes in the plan that they
call and in vLLM's own builders. Calls are those of functions in FlexQuant's files but for its CPU kernels,
counted in other passes. One sequence prefills and decodes, over and over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flexquant
from benchmarks.origin import origin
from flexquant.measuring.engine import engine

FOLDER = str(Path(flexquant.__file__).parent)
KERNELS = str(Path(FOLDER) / "serving" / "cpu")
PROMPT, TOKENS = 64, 16
"""Tokens of each prompt, and of each answer."""


class OwnTime:
    """Adds up the time in outer functions less that in inner ones, until it is asked for."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def timed(self, function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self._seconds += sign * (time.perf_counter() - began)

        return call

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def watch(self, runner: Any) -> None:
        """Time a worker's model and builders, and what they call."""
        model = runner.model
        for name in ("forward", "compute_logits"):
            setattr(model, name, self.timed(getattr(model, name), 1))
            for plan in model._plans.values():
                vars(plan)[name] = self.timed(getattr(plan, name), -1)
        kinds = set()
        for builder in [
            b for groups in runner.attn_groups for group in groups for b in group.metadata_builders
        ]:
            kinds.add(type(builder).__mro__[1])
            builder.build = self.timed(builder.build, 1)
        for kind in kinds:
            kind.build = self.timed_method(kind.build)

    def timed_method(self, function: Callable[..., Any]) -> Callable[..., Any]:
        inner = self.timed(function, -1)
        return lambda builder, *args, **named: inner(builder, *args, **named)


def counted(step: Callable[[], object]) -> int:
    """Return how many functions of FlexQuant's files a step calls."""
    calls = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        calls += event == "call" and file.startswith(FOLDER) and not file.startswith(KERNELS)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def measure(folder: Path, policy: str, requests: int) -> dict[str, Any]:
    """Return phase -> microseconds and calls of a pass: the median, and a quarter each below and above."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found: dict[str, dict[str, list[float]]] = {p: {"us": [], "calls": []} for p in ("prefill", "decode")}
    with engine(folder, flexquant={"policy": policy}, max_model_len=512, enable_prefix_caching=False) as llm:
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        own = OwnTime()
        for request in range(requests):
            is_counted = request % 4 == 0
            if request == 1:
                own.watch(runner)
            llm.llm_engine.add_request(str(request), {"prompt_token_ids": [100] * PROMPT}, parameters)
            for phase in ("prefill", *["decode"] * (TOKENS - 1)):
                if is_counted:
                    found[phase]["calls"].append(counted(llm.llm_engine.step))
                else:
                    llm.llm_engine.step()
                    found[phase]["us"].append(1e6 * own.take())
            own.take()
    return {
        phase: {what: summary(values) for what, values in of_phase.items()}
        for phase, of_phase in found.items()
    }


def summary(values: list[float]) -> dict[str, float]:
    lower, median, upper = (round(cut, 1) for cut in statistics.quantiles(values, n=4))
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper, "passes": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--policy", default="phase", help="policy to serve (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    found = measure(args.model, args.policy, args.requests)
    result = {**origin("benchmarks.own_time"), "own": found}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
