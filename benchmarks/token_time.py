# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Where does the time of a pass go on a CPU: products, attention, small operators, vLLM's own loop?

    python -m benchmarks.token_time MODEL --policy phase-batch --output benchmarks/results/token-time.json

One engine in this process decodes one sequence, or computes one prompt after another, on one thread, which
`taskset` binds to a core.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.own_cost import Decoding
from benchmarks.result import model_name, origin, write_result
from flexquant.evaluation.engine import engine

if TYPE_CHECKING:
    from vllm import LLM

PASSES = {"decode": (200, 50), "prompt": (10, 4)}
"""Kind of pass -> how many are timed, and how many are profiled."""
KINDS = {
    "products": re.compile("multiply|linear|_mm|gemm|addmm"),
    "attention": re.compile("attention|attn|kv_cache"),
}
"""Kinds of operators -> what their names contain; all others are small."""


class Clock:
    """Times a model's forward pass and its logits, in every step of an engine."""

    def __init__(self, model: Any) -> None:
        self.seconds: dict[str, list[float]] = {"forward": [], "logits": []}
        began: list[float] = []
        model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
        model.register_forward_hook(
            lambda *_: self.seconds["forward"].append(time.perf_counter() - began.pop())
        )
        compute = model.compute_logits

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = compute(*args, **kwargs)
            self.seconds["logits"].append(time.perf_counter() - started)
            return found

        model.compute_logits = timed


def compute_prompt(llm: LLM, tokens: int) -> None:
    """Compute the first token that follows a prompt of so many ``tokens``."""
    from vllm import SamplingParams

    core = llm.llm_engine
    core.add_request("prompt", {"prompt_token_ids": [100] * tokens}, SamplingParams(max_tokens=1))
    while core.has_unfinished_requests():
        core.step()


def measure(model: str, policy: str | None, eager: bool, prompt: int) -> dict[str, Any]:
    """Return medians in ms a pass: of the step, its forward pass and logits, and operators by kind.

    A pass decodes a token, or computes a ``prompt`` of so many tokens unless it is 0.
    """
    from torch.profiler import ProfilerActivity, profile

    timed, profiled_passes = PASSES["prompt" if prompt else "decode"]
    options: dict[str, Any] = {"max_model_len": 2048, "enable_prefix_caching": False, "enforce_eager": eager}
    with engine(model, flexquant={"policy": policy} if policy else None, dtype="bfloat16", **options) as llm:
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        clock, decoding = Clock(runner.model), Decoding(llm)
        run = partial(compute_prompt, llm, prompt) if prompt else decoding.step
        run() if prompt else decoding.prefill()
        steps = []
        for _ in range(timed):
            started = time.perf_counter()
            run()
            steps.append(time.perf_counter() - started)
        parts = {name: seconds[-timed:] for name, seconds in clock.seconds.items()}
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(profiled_passes):
                run()
    operators: Counter[str] = Counter()
    for found in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if names.search(found.key)), "small")
        operators[kind] += found.self_cpu_time_total / 1e6 / profiled_passes
    measured = {"step": median(steps), **{name: median(seconds) for name, seconds in parts.items()}}
    return {
        "milliseconds": {name: round(1e3 * seconds, 3) for name, seconds in measured.items()},
        "operators": {name: round(1e3 * seconds, 3) for name, seconds in sorted(operators.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="merged or published checkpoint")
    parser.add_argument("--policy", help="FlexQuant's; without one, stock vLLM serves")
    parser.add_argument("--eager", action="store_true", help="without the compiler")
    parser.add_argument("--prompt", type=int, default=0, metavar="TOKENS", help="time prompts of this length")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to add to")
    args = parser.parse_args()
    results = json.loads(args.output.read_text()) if args.output.is_file() else {}
    name = " ".join([model_name(args.model), Path(args.policy or "stock").name, *["eager"] * args.eager])
    name += f", prompt of {args.prompt}" if args.prompt else ""
    results[name] = origin("benchmarks.token_time") | measure(
        args.model, args.policy, args.eager, args.prompt
    )
    write_result(args.output, results)
    print(name, results[name]["milliseconds"], results[name]["operators"], flush=True)


if __name__ == "__main__":
    main()
