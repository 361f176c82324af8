# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read, hold and format the times of forward passes by variant; `flexquant tune` measures them.

A tuned policy holds them under its key ``measured``:

    measured:
      origin: {machine: {...}, versions: {...}, date: 2026-11-21, command: [...]}
      context: 64                # tokens of every sequence in the KV cache, in the decode passes below
      decode_ms:                 # sequences -> median, smallest and largest time over the rounds
        w8a8: {1: [60.1, 59.8, 60.9], 8: [159.0, 154.1, 161.2]}
      prefill_ms:                # tokens of one prompt, with an empty KV cache -> the same
        w8a8: {64: [290.9, 280.8, 300.2]}
"""

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import table_lines
from flexquant.documents.yaml_document import KEYS_AS_GIVEN, Number, Positive, Problem, Section, says, show
from flexquant.policy.plans import Layers

DIGITS = 4
"""Significant digits of a time in a document."""
UNITS = {"decode": "sequences", "prefill": "tokens"}
"""Phase -> unit of the sizes of its passes."""


class Time(NamedTuple):
    """Median, smallest and largest of measured times, in seconds."""

    median: float
    low: float
    high: float


Curve = Mapping[int, Time]
"""Size (sequences of a decode pass, tokens of a prefill pass) -> time, ascending in size."""


def _check_size(text: str) -> str:
    if not text.isdecimal() or int(text) < 1 or text != str(int(text)):
        raise Problem("is not a size; give whole numbers of at least 1 as keys")
    return text


def _read_time(times: list[float]) -> Time:
    median, low, high = times
    if not 0 < low <= median <= high:
        raise Problem(f"is {show(times)}; give times above 0 with low <= median <= high")
    return Time(*(ms / 1e3 for ms in times))


IN_JSON = AfterValidator(lambda value: json.dumps(value, allow_nan=False) and value)
SizeKey = Annotated[str, AfterValidator(_check_size), Field(json_schema_extra={"pattern": "^[1-9][0-9]*$"})]
Milliseconds = Annotated[
    Annotated[list[Number], Field(min_length=3, max_length=3)],
    AfterValidator(_read_time),
    says("give [median, low, high] in milliseconds"),
]
if TYPE_CHECKING:
    Curves = Mapping[str, Curve]
else:  # in a document: variant -> size as text -> milliseconds
    OfSizes = Annotated[
        dict[SizeKey, Milliseconds],
        Field(min_length=1, json_schema_extra=KEYS_AS_GIVEN),
        AfterValidator(lambda times: {size: times[str(size)] for size in sorted(map(int, times))}),
        says("give a mapping from sizes to times"),
    ]
    of_variants = "give a mapping from variants to their times"
    Curves = Annotated[dict[str, OfSizes], Field(min_length=1), says(of_variants)]


class PassTimes(Section):
    """Times of whole forward passes with sampling, by variant and size; `flexquant tune` writes them."""

    origin: Annotated[JsonObject, IN_JSON, says("give a mapping, without .inf and .nan", whole=True)]
    """Machine, versions, date and command."""
    context: Positive
    """Tokens of every sequence in the KV cache, in the decode passes."""
    decode: Curves = Field(alias="decode_ms")
    """Times by variant and sequences: median, smallest, largest; milliseconds."""
    prefill: Curves = Field(alias="prefill_ms")
    """Times by variant and tokens: median, smallest, largest; milliseconds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if set(self.decode) != set(self.prefill):
            prefill, decode = ", ".join(self.prefill), ", ".join(self.decode)
            problem = f"has the variants {prefill}, but decode_ms {decode}; give both"
            raise Problem(problem, ["prefill_ms"])
        return self

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.decode)

    def seconds(self, layers: Layers, phase: str, size: int) -> float:
        """Return the time of a pass of ``size`` sequences (decode) or tokens (prefill), in seconds.

        Each layer is taken to cost an equal share of a pass in its variant. Times are interpolated between
        measured sizes, and extrapolated beyond them, in the logarithms of time and size.
        """
        curves, number = self.decode if phase == "decode" else self.prefill, len(layers)
        counts = Counter(layers).items()
        return sum(_interpolate(curves[variant], size) * count / number for variant, count in counts)

    def only(self, variants: Collection[str]) -> Self:
        curves = {"decode": self.decode, "prefill": self.prefill}
        kept = {phase: {name: of[name] for name in of if name in variants} for phase, of in curves.items()}
        return self.model_copy(update=kept)

    def to_data(self) -> JsonObject:
        """Return the times as in a document, rounded."""
        return {
            "origin": dict(self.origin),
            "context": self.context,
            "decode_ms": _curves_to_data(self.decode),
            "prefill_ms": _curves_to_data(self.prefill),
        }


def device_name(origin: JsonObject) -> str:
    """Return the GPU, or the CPU and its cores, in a document's ``machine``, which a user's can lack."""
    machine = origin.get("machine")
    if isinstance(machine, Mapping):
        return machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    return str(machine or "an unknown machine")


def format_times(times: PassTimes, plan: Callable[[str, int], str]) -> list[str]:
    """Return a table of milliseconds by size and variant; ``plan(phase, size)`` names the policy's choice."""
    lines = []
    for phase, curves in (("decode", times.decode), ("prefill", times.prefill)):
        sizes = sorted(set.intersection(*(set(curve) for curve in curves.values())))
        rows = [[f"{phase}, ms", *curves, "plan"]]
        for size in sizes:
            unit = UNITS[phase] if size > 1 else UNITS[phase].removesuffix("s")
            cells = [_milliseconds(curve[size]) for curve in curves.values()]
            rows.append([f"{size} {unit}", *cells, plan(phase, size)])
        lines += [*table_lines(rows), ""]
    return lines[:-1]


def _milliseconds(time: Time) -> str:
    """Return median, smallest and largest, e.g. ``60.1 (59.8-60.9)``."""
    median, low, high = (f"{1e3 * seconds:.3g}" for seconds in time)
    return median if low == median == high else f"{median} ({low}-{high})"


def _interpolate(curve: Curve, size: int) -> float:
    sizes = list(curve)
    if len(sizes) == 1:
        return curve[sizes[0]].median * size / sizes[0]
    right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    a, b = sizes[right - 1], sizes[right]
    slope = math.log(curve[b].median / curve[a].median) / math.log(b / a)
    return curve[a].median * (size / a) ** slope


def _curves_to_data(curves: Mapping[str, Curve]) -> dict[str, dict[str, list[float]]]:
    def to_data(curve: Curve) -> dict[str, list[float]]:
        return {str(size): [float(f"{1e3 * s:.{DIGITS}g}") for s in time] for size, time in curve.items()}

    return {variant: to_data(curve) for variant, curve in curves.items()}
