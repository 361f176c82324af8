# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How long a forward pass takes, by variant: `tune` measures it, `predict` works it out, `simulate` uses it.

A policy that was tuned carries them under its key ``measured``:

    measured:
      origin: {machine: {...}, versions: {...}, date: 2026-11-21, command: [...]}
      context: 64                # tokens of every sequence in the KV cache, in the decode passes below
      context_ns: 12.5           # what one more token in the KV cache costs a pass, nanoseconds
      decode_ms:                 # by sequences: median, smallest and largest over the rounds
        w8a8: {1: [60.1, 59.8, 60.9], 8: [159.0, 154.1, 161.2]}
      prefill_ms:                # by tokens, of one prompt with an empty KV cache
        w8a8: {64: [290.9, 280.8, 300.2]}

Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flexquant.documents.yaml_document import Document, KeyPath, show

DIGITS = 4
"""Significant digits of a time in a document."""


class Time(NamedTuple):
    """The median of measured times, the smallest and the largest, in seconds."""

    median: float
    low: float
    high: float


Curve = Mapping[int, Time]
"""Times by size, ascending: sequences of a decode pass, tokens of a prefill pass."""


@dataclass(frozen=True)
class PassTimes:
    """Times of whole forward passes with sampling, by variant and size."""

    decode: Mapping[str, Curve]
    prefill: Mapping[str, Curve]
    context: int
    """Tokens that every sequence had in the KV cache in the decode passes."""
    context_seconds: float
    """What one more token in the KV cache, of any sequence, adds to a pass; the same for all variants."""
    origin: Mapping[str, Any]
    """Where the times come from, as JSON-able data: machine, versions, date, command; or a device."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.decode)

    def seconds(self, layers: tuple[str, ...], phase: str, size: int) -> float:
        """Return the time of a pass of ``size`` sequences (decode) or tokens (prefill, mixed), in seconds.

        ``layers``: the variant of every decoder layer (``Plan.layers`` of :mod:`flexquant.policy.routes`),
        each of which is taken to cost its share of a pass. Between measured sizes times are interpolated,
        beyond them extrapolated, in the logarithms of both.
        """
        curves = self.decode if phase == "decode" else self.prefill
        return sum(
            _interpolate(curves[variant], size) * layers.count(variant) / len(layers)
            for variant in dict.fromkeys(layers)
        )

    def to_data(self) -> dict[str, Any]:
        """Return plain data that :func:`read_pass_times` reads back, with rounded times."""
        return {
            "origin": dict(self.origin),
            "context": self.context,
            "context_ns": _round(self.context_seconds * 1e9),
            "decode_ms": _curves_to_data(self.decode),
            "prefill_ms": _curves_to_data(self.prefill),
        }


def device_name(origin: Mapping[str, Any]) -> str:
    """Return the GPU, or the CPU and its cores, of the ``machine`` of a document.

    That is one of :mod:`flexquant.measuring.machine`. Of times that were predicted it is the ``device``; a
    document of a user's may have neither.
    """
    machine = origin.get("machine")
    if isinstance(machine, Mapping):
        return machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    return str(machine or origin.get("device") or "an unknown machine")


def read_pass_times(data: Any, path: KeyPath, document: Document) -> PassTimes:
    """Validate the value at ``path``; raise :class:`FlexQuantError` that names the wrong key."""
    document.check_keys(data, path, ("origin", "context", "context_ns", "decode_ms", "prefill_ms"))
    if not isinstance(data["origin"], dict):
        document.fail((*path, "origin"), f"is {show(data['origin'])}; give a mapping")
    context = data["context"]
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        document.fail((*path, "context"), f"is {show(context)}; give a whole number of at least 1")
    context_ns = _number(data["context_ns"], (*path, "context_ns"), document)
    decode, prefill = (_read_curves(data[key], (*path, key), document) for key in ("decode_ms", "prefill_ms"))
    if set(decode) != set(prefill):
        document.fail(
            (*path, "prefill_ms"),
            f"has the variants {', '.join(prefill)}, but decode_ms {', '.join(decode)}; give both",
        )
    return PassTimes(decode, prefill, context, context_ns / 1e9, data["origin"])


def _read_curves(data: Any, path: KeyPath, document: Document) -> dict[str, Curve]:
    if not isinstance(data, dict) or not data:
        document.fail(path, f"is {show(data)}; give a mapping from variants to their times")
    curves: dict[str, Curve] = {}
    for variant, entries in data.items():
        if not isinstance(entries, dict) or not entries:
            document.fail((*path, variant), f"is {show(entries)}; give a mapping from sizes to times")
        curve = {}
        for size, value in entries.items():
            place = (*path, variant, size)
            if not str(size).isdecimal() or int(size) < 1:
                document.fail(place, "is not a size; give whole numbers of at least 1 as keys")
            if not isinstance(value, list) or len(value) != 3:
                document.fail(place, f"is {show(value)}; give [median, low, high] in milliseconds")
            median, low, high = (_number(x, place, document) / 1e3 for x in value)
            if not 0 < low <= median <= high:
                document.fail(place, f"is {show(value)}; give times above 0 with low <= median <= high")
            curve[int(size)] = Time(median, low, high)
        curves[variant] = dict(sorted(curve.items()))
    return curves


def _number(value: Any, path: KeyPath, document: Document) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        document.fail(path, f"is {show(value)}; give a number of at least 0")
    return float(value)


def _interpolate(curve: Curve, size: int) -> float:
    sizes = list(curve)
    if len(sizes) == 1:
        return curve[sizes[0]].median * size / sizes[0]
    right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    a, b = sizes[right - 1], sizes[right]
    slope = math.log(curve[b].median / curve[a].median) / math.log(b / a)
    return curve[a].median * (size / a) ** slope


def _curves_to_data(curves: Mapping[str, Curve]) -> dict[str, dict[str, list[float]]]:
    return {
        variant: {str(size): [_round(1e3 * seconds) for seconds in time] for size, time in curve.items()}
        for variant, curve in curves.items()
    }


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
