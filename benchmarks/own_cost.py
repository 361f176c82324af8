# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What does FlexQuant itself add to a decode pass, beside the kernels that the plan chooses?

    python -m benchmarks.own_cost MERGED --output benchmarks/results/own-cost.json

One engine has a policy of one variant. In turns from pass to pass, vLLM calls either FlexQuant's model, which
describes the pass, looks the plan up, counts and times; or the variant's own model, of vLLM's class, with
vLLM's own metadata builders, as stock vLLM does for that variant's checkpoint. The engine decodes one
sequence: the shortest passes, on which a fixed cost weighs most.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.result import origin, write_result
from flexquant.evaluation.comparison import Effort, compare
from flexquant.evaluation.engine import engine

if TYPE_CHECKING:
    from vllm import LLM

PASSES = 8
"""Decode passes with, and as many without, the measured part in a round."""


class Decoding:
    """Decodes one sequence of an engine in this process, pass by pass."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._tokens = llm.model_config.max_model_len - 1
        self._requests = 0

    def prefill(self) -> None:
        """Begin a sequence if the last one has come to its end."""
        from vllm import SamplingParams

        if not self._engine.has_unfinished_requests():
            parameters = SamplingParams(temperature=0, max_tokens=self._tokens, ignore_eos=True)
            self._requests += 1
            self._engine.add_request(str(self._requests), {"prompt_token_ids": [100]}, parameters)
            self._engine.step()

    def step(self) -> None:
        """Decode a token."""
        self._engine.step()


def compare_in_turns(
    step: Callable[[], None], switch: Callable[[bool], None], effort: Effort
) -> dict[str, Any]:
    """Time ``step`` with and without what ``switch`` switches on, in rounds; return the ratio of times.

    A round takes PASSES steps with it and as many without, in turn, and adds up the times of each. One
    process does both, so that no two processes differ by chance. Rounds are doubled until the interval is
    narrow.
    """
    for on in (True, False):
        switch(on)
        step()
    rounds: list[dict[bool, float]] = []
    ratios: list[float] = []
    wanted = effort.rounds
    while len(rounds) < wanted:
        seconds = {True: 0.0, False: 0.0}
        for turn in range(2 * PASSES):
            on = (turn + turn // 2 + len(rounds)) % 2 == 0  # on, off, off, on, ...
            switch(on)
            began = time.perf_counter()
            step()
            seconds[on] += time.perf_counter() - began
        rounds.append(seconds)
        ratios.append(seconds[True] / seconds[False])
        if len(rounds) == wanted and not compare(ratios).is_narrow(effort.width):
            wanted = min(2 * wanted, effort.max_rounds)
    found = compare(ratios)
    return {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "words": found.words("less time", "more time"),
        "on_seconds": [round(times[True], 6) for times in rounds],
        "off_seconds": [round(times[False], 6) for times in rounds],
    }


def measure(folder: Path, variant: str, effort: Effort) -> dict[str, Any]:
    """Compare an engine that serves one variant through FlexQuant with the same engine without FlexQuant."""
    options: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False}
    with engine(folder, flexquant={"policy": variant}, **options) as llm:
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        served = runner.model
        builders = [b for groups in runner.attn_groups for group in groups for b in group.metadata_builders]
        observed = [type(builder) for builder in builders]

        decoding = Decoding(llm)

        def switch(on: bool) -> None:
            decoding.prefill()
            runner.model = served if on else served.variants[variant]
            for builder, kind in zip(builders, observed, strict=True):
                builder.__class__ = kind if on else kind.__mro__[1]

        found = compare_in_turns(decoding.step, switch, effort)
    seconds = sum(found["off_seconds"]) / len(found["off_seconds"])
    return found | {"pass_ms": round(1000 * seconds / PASSES, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--variant", default="w8a8", help="variant to serve alone (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to add to, by model")
    parser.add_argument("--rounds", type=int, default=400, help="fewest rounds (%(default)s)")
    parser.add_argument("--max-rounds", type=int, default=1600, help="most rounds (%(default)s)")
    parser.add_argument("--width", type=float, default=0.005, help="interval at which to stop (%(default)s)")
    args = parser.parse_args()
    results = json.loads(args.output.read_text()) if args.output.is_file() else {}
    found = measure(args.model, args.variant, Effort(args.rounds, args.max_rounds, args.width))
    results[f"{args.model.parent.name}/{args.model.name}"] = origin("benchmarks.own_cost") | found
    write_result(args.output, results)
    print(f"{found['words']}; ratio {found['ratio']:.4f} of {found['pass_ms']} ms a pass", flush=True)


if __name__ == "__main__":
    main()
