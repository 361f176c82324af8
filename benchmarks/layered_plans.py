# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What do layered plans win: searched ones, beside the first, last, outer and random layers?

    python -m benchmarks.layered_plans MERGED --text CHOOSE.txt --unseen OTHER.txt --reference MODEL \
        --policy TUNED.yaml --layers 4 8 15 --output benchmarks/results/layered

`flexquant search` chooses plans on one text, for each number of raised layers. On another text, which chose
nothing, the benchmark measures the KL divergence of decode to the 16-bit model: under these plans, the
variants alone, and plans that raise as many layers at other places. Times of passes are those of the tuned
policy. The same command started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed.results import git_commit
from flexquant.checkpoint.output import staged_file
from flexquant.cli._arguments import add_study, study_of, tell
from flexquant.documents.figures import new_figure
from flexquant.layers.searching import Budget, Search
from flexquant.layers.sensitivity import Study
from flexquant.layers.sensitivity_report import estimate
from flexquant.measuring.machine import describe_command, describe_machine, describe_versions
from flexquant.policy.choose import find_measured
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.plans import Layers, all_in, describe_layers

SEARCHED = "searched"


def choose(
    study: Study, times: PassTimes, raised: list[int], sequences: int, file: Path
) -> dict[Layers, str]:
    """Return each plan with how it was chosen.

    The plans are the variants alone and, for each number of raised layers, the searched plan and those that
    no measurement chose.
    """
    plans = {all_in(variant, study.subject.num_layers): variant for variant in study.variants}
    for number in raised:
        search = Search(study, times, Budget(layers=number), sequences, compare=True)
        found = search.run(file, overwrite=False, progress=tell)
        for name, plan in [(SEARCHED, found.chosen), *found.others.items()]:
            plans.setdefault(plan.layers, f"{name}, {number}")
    return plans


def measure(study: Study, plans: dict[Layers, str], times: PassTimes, sequences: int, file: Path) -> Any:
    """Return for every plan how it was chosen, its time, and the KL divergence of every row of the text."""
    with study.measuring(file, overwrite=False, progress=tell) as (_, score):
        found = []
        for layers, chosen_by in plans.items():
            tell(f"{chosen_by}: {describe_layers(layers)}")
            ms = 1000 * times.seconds(layers, "decode", sequences)
            found.append(
                {"chosen_by": chosen_by, "plan": describe_layers(layers), "ms": ms, "kl": score(layers)}
            )
    return found


def save_plot(document: dict[str, Any], file: Path) -> None:
    """Draw KL divergence against decode time, as a PNG."""
    figure, canvas = new_figure(7, 4.5)
    axes = figure.subplots()
    kinds: dict[str, list[tuple[float, float]]] = {}
    for plan in document["plans"]:
        chosen_by, _, raised = plan["chosen_by"].partition(", ")
        kind = "random" if chosen_by.startswith("random") else chosen_by if raised else "variants alone"
        kinds.setdefault(kind, []).append((plan["ms"], estimate(plan["kl"]).mean))
    for kind, places in kinds.items():
        axes.plot(*zip(*sorted(places), strict=True), "*-" if kind == "searched" else "o", label=kind)
    axes.set_xlabel("decode pass, ms")
    axes.set_ylabel("KL divergence to 16 bit, nats a token")
    axes.set_title(f"{document['checkpoint']}: layers raised to {document['variants'][0]}")
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.print_figure(file, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_study(parser, "sensitivity.json, unseen.json, layered.json and layered.png")
    parser.add_argument("--unseen", type=Path, required=True, metavar="FILE", help="text to measure on")
    parser.add_argument("--policy", required=True, metavar="FILE", help="what 'flexquant tune' wrote")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[4, 8, 15], metavar="N", help="layers to raise"
    )
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="sequences of the timed pass")
    args = parser.parse_args()
    study = study_of(args)
    unseen = replace(study, text=args.unseen)
    measured = find_measured(args.policy)
    assert measured is not None  # a policy without times is refused
    times, _ = measured
    args.output.mkdir(parents=True, exist_ok=True)
    chosen_on, measured_on = (args.output / name for name in ("sensitivity.json", "unseen.json"))
    if args.overwrite:
        for file in (chosen_on, measured_on):
            file.unlink(missing_ok=True)
    plans = choose(study, times, args.layers, args.sequences, chosen_on)
    found = measure(unseen, plans, times, args.sequences, measured_on)
    document = {
        **{key: value for key, value in unseen.described().items() if key != "kl"},
        "chosen_on": args.text.name,
        "times": Path(args.policy).name,
        "sequences": args.sequences,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": git_commit(),
        "argv": ["python", "-m", "benchmarks.layered_plans", *describe_command()[1:]],
        "plans": found,
    }
    with staged_file(args.output / "layered.json") as partial:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with staged_file(args.output / "layered.png") as partial:
        save_plot(document, partial)


if __name__ == "__main__":
    main()
