# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What does it cost to take another plan in every pass, beyond the times that the plans take by themselves?

    python -m benchmarks.switching MERGED --output benchmarks/results/switching.json

One engine decodes one sequence: as many passes in each of two variants, in turn from pass to pass, or first
all of the one and then all of the other. Both ways have the same passes, so that their ratio tells what
switching adds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.turns import Decoding, add_effort, compare_in_turns, effort_of
from flexquant.measuring.comparison import Effort
from flexquant.measuring.engine import engine, take_policy
from flexquant.policy.schema import SCHEMA

PASSES = 16
"""Decode passes in a turn, half of them in each variant."""
TURNS = 2


def constant(variant: str) -> dict[str, Any]:
    """Return the policy that takes a variant for every pass."""
    return {"schema": SCHEMA, "rules": [{"use": variant}]}


def measure(folder: Path, variants: tuple[str, str], effort: Effort) -> dict[str, Any]:
    """Compare passes whose plans alternate with the same passes, one plan after the other."""
    # A sequence is its prompt, its first token and then whole turns, so that it ends with a turn.
    options: dict[str, Any] = {"max_model_len": 32 * PASSES + 2, "enable_prefix_caching": False}
    with engine(folder, flexquant={"policy": variants[0]}, **options) as llm:
        (served,) = llm.apply_model(lambda model: model)
        policies = []
        for variant in variants:
            take_policy(llm, variant, constant(variant))
            policies.append(served.policy)
        first, second = policies
        apart, in_turn = [first] * (PASSES // 2) + [second] * (PASSES // 2), [first, second] * (PASSES // 2)
        decoding, order = Decoding(llm), apart

        def serve() -> None:
            for policy in order:
                served.policy = policy
                decoding.step()

        def switch(on: bool) -> None:
            nonlocal order
            order = in_turn if on else apart
            decoding.prefill()

        found = compare_in_turns(serve, switch, effort, TURNS)
    seconds = sum(found["off_seconds"]) / len(found["off_seconds"])
    return found | {"pass_ms": round(1000 * seconds / (TURNS * PASSES), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--variants", nargs=2, default=("w8a8", "w4a16"), metavar="NAME")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    add_effort(parser)
    args = parser.parse_args()
    found = measure(args.model, tuple(args.variants), effort_of(args))
    result = {
        **origin("benchmarks.switching"),
        **found,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{found['words']}; ratio {found['ratio']:.4f} of {found['pass_ms']} ms a pass", flush=True)


if __name__ == "__main__":
    main()
