# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Turn answers into the results that are written (shares, differences, where answers part) and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.generation.answering import Answers
from benchmarks.generation.intervals import compare_paired, median_of, wilson
from benchmarks.generation.task import Task, is_right, text_of
from benchmarks.result import markdown
from flexquant.evaluation.evaluating import REFERENCE
from flexquant.evaluation.measure import TokenIds

CHECKED = ("arithmetic", "instructions")


def first_difference(first: TokenIds, second: TokenIds) -> int | None:
    """Return the number, from 1, of the first token that differs, the end included; None if none differs."""
    for number, (a, b) in enumerate(zip(first, second, strict=False), 1):
        if a != b:
            return number
    return None if len(first) == len(second) else min(len(first), len(second)) + 1


def results_of(answers: Answers, tokens: dict[str, int], tokenizer: Any) -> list[dict[str, Any]]:
    """Return an entry for the 16-bit model, its second answers, and every policy, as data for JSON.

    ``tokens`` is kind -> most tokens of an answer. An entry's ``against`` compares it with the 16-bit model
    and with the first policy.
    """
    texts = {
        name: {kind: [text_of(answer, tokenizer) for answer in found] for kind, found in kinds.items()}
        for name, kinds in answers.by_policy.items()
    }
    right = {
        name: {kind: list(map(is_right, answers.tasks[kind], kinds[kind])) for kind in CHECKED}
        for name, kinds in texts.items()
    }
    first_policy = next(iter(answers.same_as))
    results = []
    for name, kinds in answers.by_policy.items():
        result: dict[str, Any] = {"policy": name, "same_as": answers.same_as.get(name)}
        if name in answers.passes:
            result["passes"] = answers.passes[name].by_plan
        result["kinds"] = {
            kind: {
                "empty": sum(not text for text in texts[name][kind]),
                "cut": sum(len(answer) >= tokens[kind] for answer in found),
                "tokens": sum(map(len, found)),
            }
            | (_accuracy(answers.tasks[kind], right[name][kind]) if kind in CHECKED else {})
            for kind, found in kinds.items()
        }
        result["against"] = {
            other: {kind: asdict(compare_paired(right[name][kind], right[other][kind])) for kind in CHECKED}
            | {"long": _parting(kinds["long"], answers.by_policy[other]["long"])}
            for other in dict.fromkeys((REFERENCE, first_policy))
            if other != name and not (other == first_policy and name.startswith(REFERENCE))
        }
        results.append(result)
    return results


def _accuracy(tasks: Sequence[Task], right: Sequence[bool]) -> dict[str, Any]:
    asked = Counter(task.family for task in tasks)
    found = Counter(task.family for task, good in zip(tasks, right, strict=True) if good)
    return {
        "right": sum(right),
        "of": len(right),
        "interval": wilson(sum(right), len(right)),
        "families": {family: [found[family], number] for family, number in asked.items()},
        "each": "".join("1" if good else "0" for good in right),
    }


def _parting(answers: Sequence[TokenIds], others: Sequence[TokenIds]) -> dict[str, Any]:
    at = [first_difference(a, b) for a, b in zip(answers, others, strict=True)]
    return {**asdict(median_of(at)), "same": at.count(None), "of": len(at), "at": at}


def table(document: dict[str, Any]) -> str:
    """Return a table of the shares that are right, the differences, and where long answers part."""
    results = document["results"]
    sixteen_bit = results[0]["policy"]
    baseline = next(r["policy"] for r in results if "passes" in r)
    header = ["policy", "decode", "arithmetic right", "against 16 bit", "instructions followed"]
    header += ["against 16 bit", "first other token than 16 bit", f"than `{baseline}`"]
    rows = []
    for result in results:
        name, against = result["policy"], result["against"]
        reference, first = against.get(sixteen_bit), against.get(baseline)
        row = [f"`{name}`" if "passes" in result else name.replace(sixteen_bit, "16 bit")]
        row += [", ".join(f"`{plan}`" for plan in result.get("passes", {}).get("decode", {})) or "–"]
        for kind in ("arithmetic", "instructions"):
            row += [share(result["kinds"][kind]), difference(reference and reference[kind])]
        rows.append([*row, *(parting(other and other["long"]) for other in (reference, first))])
    return markdown(header, rows)


def share(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['right'] / found['of']:.0%} ({low:.0%} – {high:.0%})"


def difference(found: dict[str, Any] | None) -> str:
    """Return the difference in points with its interval, and how many tasks each alone gets right."""
    if not found:
        return "–"
    points = [f"{100 * found[key]:+.0f}" for key in ("difference", "low", "high")]
    return f"{points[0]} ({points[1]} to {points[2]}; {found['only_first']} : {found['only_second']})"


def parting(found: dict[str, Any] | None) -> str:
    """Return the median token at which answers part, with its interval, and how many answers are equal."""
    if not found:
        return "–"
    ends = found["interval"]
    interval = f" ({number(ends[0])} – {number(ends[1])})" if ends else ""
    return f"{number(found['median'])}{interval}, {found['same']} of {found['of']} the same"


def number(token: float | None) -> str:
    return "none" if token is None else f"{token:g}"
