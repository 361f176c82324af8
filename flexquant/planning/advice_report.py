# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Format advice on how to serve a model as a table and a few sentences, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import table_lines
from flexquant.planning.advising import (
    MARGIN,
    ONE_COPY,
    TWO_COPIES,
    Batches,
    Outcome,
    choose,
    fastest_way,
    find_way,
)
from flexquant.planning.device import Device
from flexquant.planning.planned_model import PlannedModel

WIDTH = 110


def advice_to_json(outcomes: Sequence[Outcome]) -> JsonObject:
    """Return the outcomes by way, and the choice, as JSON-able data."""
    choice = choose(outcomes)
    return {
        "ways": {
            outcome.way.name: {
                "weights_gib": outcome.weights_gib,
                "kv_cache_tokens": outcome.kv_cache_tokens,
                "loads": {count: asdict(load) for count, load in outcome.loads.items()},
                "problem": outcome.problem,
            }
            for outcome in outcomes
        },
        "choice": choice and choice.way.name,
        "helps": choice is not None and choice.way.is_flexquant,
    }


def format_advice(outcomes: Sequence[Outcome], model: PlannedModel, device: Device, batches: Batches) -> str:
    """Return the advice as text for a terminal."""
    notes = [f"note: {note}" for note in _notes(outcomes, model, device, batches)]
    lines = [
        f"requests of {batches.input_tokens} + {batches.output_tokens} tokens, so many at once; times in ms:",
        *_table(outcomes, batches),
        "",
        *(line for text in (explain(outcomes), *notes) for line in wrap(text, WIDTH, break_on_hyphens=False)),
    ]
    return "\n".join(lines)


def explain(outcomes: Sequence[Outcome]) -> str:
    """Return the choice and why, in a sentence or two."""
    choice = choose(outcomes)
    if choice is None:
        return (
            "None of these can serve the model on this device: take a larger device, a larger "
            "--tensor-parallel-size or shorter requests."
        )
    ours, stock = (fastest_way(outcomes, is_flexquant=which) for which in (True, False))
    if choice.way.is_flexquant and stock is None:
        return f"Take {choice.way.name}: nothing without FlexQuant serves the model on this device."
    if choice.way.is_flexquant and stock is not None:
        gain = 1 - choice.seconds / stock.seconds
        return (
            f"Take {choice.way.name}: a request takes {gain:.0%} less time (geometric mean over the columns) "
            f"than with {stock.way.name}, the best without FlexQuant, as {_reason(choice)}."
            f"{_more(choice, outcomes)}"
        )
    start = f"FlexQuant will not help you here: take {choice.way.name}"
    if ours is None:
        return f"{start}, as neither one copy nor two can be served on this device."
    gain = 1 - ours.seconds / choice.seconds
    if gain <= 0:
        return f"{start}, as a request takes {-gain:.1%} more time with {ours.way.name}."
    return (
        f"{start}, as {ours.way.name} would save {gain:.1%} of a request's time, and a prediction cannot "
        f"tell less than {MARGIN:.0%} from nothing."
    )


def _reason(choice: Outcome) -> str:
    if choice.way.name == ONE_COPY:
        return "prompts compute in INT8 and answers read INT4 weights, which are in memory once"
    eight = "FP8" if "fp8" in choice.way.schemes else "INT8"
    return f"prompts compute in {eight} and answers read INT4 weights, both of which are in memory"


def _more(choice: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Return what two copies would give beyond one, and for what memory, as a further sentence."""
    two = find_way(outcomes, TWO_COPIES)
    if choice.way.name != ONE_COPY or not two.loads:
        return ""
    gain, memory = 1 - two.seconds / choice.seconds, two.weights_gib - choice.weights_gib
    return f" Two copies would save {max(gain, 0):.1%} more, for {memory:.1f} GiB more of weights."


def _table(outcomes: Sequence[Outcome], batches: Batches) -> list[str]:
    heads = [["", "weights", "KV cache"], ["", "GiB", "tokens"]]
    for count in batches.concurrency:
        heads[0] += [str(count), ""]
        heads[1] += ["TTFT", "TPOT"]
    rows = [*heads]
    for outcome in outcomes:
        row = [outcome.way.name, f"{outcome.weights_gib:.3g}"]
        if outcome.kv_cache_tokens is not None:
            row.append(str(outcome.kv_cache_tokens))
        for load in outcome.loads.values():
            row += [_ms(load.ttft), _ms(load.tpot)]
        rows.append(row)
    lines = table_lines(rows, numbers=range(1, len(heads[0])))
    problems = ["", "", *(outcome.problem for outcome in outcomes)]
    return [f"{line}  {problem}".rstrip() for line, problem in zip(lines, problems, strict=True)]


def _notes(
    outcomes: Sequence[Outcome], model: PlannedModel, device: Device, batches: Batches
) -> Iterator[str]:
    choice, one = choose(outcomes), find_way(outcomes, ONE_COPY)
    yield "this is predicted; 'flexquant tune' measures. Quality is not compared; 'flexquant eval' does that"
    if choice is not None and choice.kv_cache_tokens is not None:
        fit = choice.kv_cache_tokens // (batches.input_tokens + batches.output_tokens)
        if fit < max(batches.concurrency):
            yield (
                f"the KV cache of {choice.way.name} holds {fit} requests at once, and further ones wait; a "
                "larger --tensor-parallel-size or device would hold more"
            )
    if one.loads and device.is_gpu:
        yield "one copy has not run on a GPU yet: its times there are the least certain"
    if one.loads and model.has_experts:
        yield "one copy leaves experts in INT4 for prompts too"
    if device.is_gpu and "w8a8" not in device.kernels:
        yield "NVFP4, if the device has it, is not compared"
    if not device.is_gpu:
        yield "on CPUs W8A8 and W4A16 are timed with the kernels that FlexQuant chooses"
    if model.has_towers:
        yield "what reads images or sound is not counted"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"
