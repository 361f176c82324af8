# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Does a run-time trigger raise the right decode passes? Against as many at regular and at random places.

    python -m benchmarks.trigger MERGED --text TEXT --reference MODEL --output benchmarks/results/trigger.json

Rows of text are decoded one at a time, in the lowest precision but for the passes that a trigger raises: by
the entropy of the last tokens' distributions, or by the margin of the likeliest. How many each trigger raised
is read from the trace; then schedules raise exactly as many of the same rows' passes, evenly spaced and drawn
at random. All are measured as `flexquant eval` does: the KL divergence to the 16-bit model, with its standard
error over rows.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.results import git_commit
from flexquant.checkpoint.output import staged_file
from flexquant.documents.yaml_document import to_yaml
from flexquant.evaluation.evaluating import evaluate
from flexquant.evaluation.inputs import Settings
from flexquant.policy.schema import SCHEMA

TRIGGERS: dict[str, dict[str, Any]] = {
    "entropy from 2": {"signal": "entropy", "aggregate": "max", "enter": 2.0},
    "entropy from 3": {"signal": "entropy", "aggregate": "max", "enter": 3.0},
    "inverse margin from 5": {"signal": "inverse_margin", "aggregate": "max", "enter": 5.0},
}
RANDOM = 3
"""Random schedules that are drawn for each trigger."""


def policy_of(trigger: Mapping[str, Any], variants: tuple[str, str]) -> dict[str, Any]:
    """Return the policy that decodes in the lower variant, the second, but for the passes that are unsure."""
    higher, lower = variants
    return {
        "schema": SCHEMA,
        "experimental": {"trigger": dict(trigger)},
        "rules": [
            {"when": {"phase": "decode", "unsure": True}, "use": higher},
            {"when": {"phase": "decode"}, "use": lower},
            {"use": higher},
        ],
    }


def evenly(raised: int, passes: int) -> str:
    """Return a pattern of ``passes`` passes, ``raised`` of which are raised, evenly spaced."""
    return "".join(
        "1" if (number + 1) * raised // passes > number * raised // passes else "0"
        for number in range(passes)
    )


def at_random(raised: int, passes: int, seed: int) -> str:
    """Return a pattern of ``passes`` passes, ``raised`` of which are raised, drawn without repetition."""
    places = set(random.Random(seed).sample(range(passes), raised))
    return "".join("1" if number in places else "0" for number in range(passes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--reference", required=True, metavar="MODEL", help="the 16-bit model")
    parser.add_argument("--variants", nargs=2, default=("w8a8", "w4a16"), metavar=("HIGHER", "LOWER"))
    parser.add_argument("--samples", type=int, default=24, metavar="N", help="rows (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens forced in a row (%(default)s)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    settings = Settings((1,), args.samples, prompt_tokens=64, tokens=args.tokens)
    passes = args.samples * (args.tokens - 1)
    variants = (args.variants[0], args.variants[1])

    def measure(triggers: Mapping[str, Mapping[str, Any]], *others: str) -> dict[str, Any]:
        """Return the document of `flexquant eval` for policies with these triggers, by name, and others."""
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, f"{name}.yaml") for name in triggers}
            for name, file in files.items():
                file.write_text(to_yaml(policy_of(triggers[name], variants)))
            return evaluate(
                args.model,
                args.text,
                reference=args.reference,
                policies=[*others, *map(str, files.values())],
                questions=[],
                settings=settings,
                progress=lambda message: print(message, flush=True),
            )

    triggered = measure(TRIGGERS, "phase", variants[0])
    raised = {
        result["policy"].removesuffix(".yaml"): sum(result["passes"].get("unsure", {}).values())
        for result in triggered["results"]
        if result["policy"].endswith(".yaml")
    }
    schedules: dict[str, dict[str, Any]] = {}
    for name, count in raised.items():
        schedules[f"{name}, evenly"] = {"schedule": evenly(count, passes)}
        for seed in range(RANDOM):
            schedules[f"{name}, random {seed + 1}"] = {"schedule": at_random(count, passes, seed)}
    scheduled = measure(schedules)
    found = {
        result["policy"].removesuffix(".yaml"): result["quality"]
        for result in [*triggered["results"], *scheduled["results"]]
    }
    keys = ("checkpoint", "reference", "settings", "text", "machine", "versions", "argv")
    document = {
        **{key: triggered[key] for key in keys},
        "commit": git_commit(),
        "passes": passes,
        "raised": raised,
        "quality": found,
    }
    with staged_file(args.output) as partial:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
