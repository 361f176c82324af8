# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the traffic of a live server: how many passes of which size each plan ran, and how long they took."""

from __future__ import annotations

import math
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexquant.checkpoint.module_names import describe_range
from flexquant.errors import FlexQuantError, UsageError
from flexquant.serving.frontend.metrics import POLICY, SECONDS, SIZE, WEIGHT_BYTES

FEWEST_PASSES = 100

CounterValues = Mapping[tuple[str, ...], float]
"""(Metric, plan, phase, bucket, policy, variant, layers) -> value; a label that a metric lacks is empty."""


@dataclass(frozen=True)
class Cell:
    """Passes of one plan, phase and size."""

    plan: str
    phase: str
    size: int
    """Sequences of decode passes, tokens of others; the middle of a histogram bucket."""
    passes: float


@dataclass(frozen=True)
class Traffic:
    """The passes of a server during an observation."""

    cells: Sequence[Cell]
    seconds: Mapping[tuple[str, str], float]
    """(Plan, phase) -> total seconds of its passes."""
    policy: str
    """Name of the server's policy."""
    variants: Sequence[str]
    """Variants that are loaded with all layers."""

    @property
    def passes(self) -> int:
        return round(sum(cell.passes for cell in self.cells))


def watch(url: str, seconds: float) -> Traffic:
    """Return the traffic of the next ``seconds``; 0: all traffic since the server's start.

    ``url`` is the URL of ``vllm serve``. Raises FlexQuantError if no merged checkpoint is served there, for
    fewer than FEWEST_PASSES passes, and for a server that was restarted meanwhile.
    """
    before: CounterValues = {}
    if seconds:
        before = _read_counters(url)
        time.sleep(seconds)
    after = _read_counters(url)
    _check_counted_on(after, before, url)
    traffic = _traffic(after, before)
    if traffic.passes < FEWEST_PASSES:
        span = f" in {seconds:g} s" if seconds else ""
        raise FlexQuantError(
            f"{url} has had {traffic.passes} passes{span}, too few to tell its traffic; watch it under its "
            f"usual load until there are {FEWEST_PASSES} or more"
        )
    return traffic


def _read_counters(url: str) -> CounterValues:
    """Return the counters, summed over the server's engines."""
    from prometheus_client.parser import text_string_to_metric_families

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"'{url}' is no URL of a server; write e.g. http://127.0.0.1:8000")
    page = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    try:
        with urllib.request.urlopen(page, timeout=60) as reply:
            text = reply.read().decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (OSError, ValueError) as e:
        raise FlexQuantError(f"cannot read {page} ({e}); check that vllm serve runs there") from e
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for name, labels, value, *_ in samples:
        told = (labels.get(key, "") for key in ("plan", "phase", "le", "policy", "variant", "layers"))
        if name.startswith("flexquant:"):
            found[name, *told] += value
    if not found:
        raise FlexQuantError(f"{page} has no metrics of FlexQuant; give the URL of a server of a merged one")
    return found


def _check_counted_on(after: CounterValues, before: CounterValues, url: str) -> None:
    """Raise FlexQuantError if a counter has become less or is gone, which means that the server restarted."""
    for counter, value in before.items():
        if counter[0] in (f"{SIZE}_bucket", f"{SECONDS}_total") and after.get(counter, -1.0) < value:
            raise FlexQuantError(
                f"{url} was started again while its traffic was watched; watch it again, or give --seconds 0 "
                "for all since its start"
            )


def _loaded_whole(ranges: Sequence[tuple[str, str]]) -> list[str]:
    """Return the variants with all decoder layers of the reporting rank, from (variant, ``0-3``) pairs."""
    ends = [int(end) for _, layers in ranges if layers for end in layers.split("-")]
    whole = describe_range(range(min(ends), max(ends) + 1)) if ends else ""
    return [variant for variant, layers in ranges if layers == whole]


def _traffic(after: CounterValues, before: CounterValues) -> Traffic:
    cumulative: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
    seconds: dict[tuple[str, str], float] = {}
    for (name, plan, phase, end, *_), value in after.items():
        if name == f"{SIZE}_bucket":
            cumulative[plan, phase][float(end)] = value
        elif name == f"{SECONDS}_total":
            seconds[plan, phase] = value - before.get((name, plan, phase, "", "", "", ""), 0.0)
    for (name, plan, phase, end, *_), value in before.items():
        if name == f"{SIZE}_bucket":
            cumulative[plan, phase][float(end)] -= value
    cells = [
        Cell(plan, phase, _middle(low, high), count - below)
        for (plan, phase), counts in cumulative.items()
        for (low, below), (high, count) in pairwise([(0.0, 0.0), *sorted(counts.items())])
        if count > below
    ]
    named = [(policy, name, value) for (name, *_, policy, _, _), value in after.items()]
    return Traffic(
        cells,
        seconds,
        next((policy for policy, name, value in named if name == POLICY and value), "unknown"),
        _loaded_whole([(variant, layers) for (name, *_, variant, layers) in after if name == WEIGHT_BYTES]),
    )


def _middle(low: float, high: float) -> int:
    """Return the geometric mean of a bucket's smallest and largest size, ``low`` + 1 and ``high``."""
    return round(low + 1 if math.isinf(high) else math.sqrt((low + 1) * high))
