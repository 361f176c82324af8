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
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.turns import PASSES, Decoding, add_effort, compare_in_turns, effort_of
from flexquant.measuring.comparison import Effort
from flexquant.measuring.engine import engine


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

        found = compare_in_turns(decoding.step, switch, effort, PASSES)
    seconds = sum(found["off_seconds"]) / len(found["off_seconds"])
    return found | {"pass_ms": round(1000 * seconds / PASSES, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--variant", default="w8a8", help="variant to serve alone (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to add to, by model")
    add_effort(parser)
    args = parser.parse_args()
    results = json.loads(args.output.read_text()) if args.output.is_file() else {}
    found = measure(args.model, args.variant, effort_of(args))
    results[f"{args.model.parent.name}/{args.model.name}"] = {
        **origin("benchmarks.own_cost"),
        **found,
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{found['words']}; ratio {found['ratio']:.4f} of {found['pass_ms']} ms a pass", flush=True)


if __name__ == "__main__":
    main()
