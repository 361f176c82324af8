# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make random traces, equal for equal seeds; `python -m benchmarks.arrivals` writes the built-in traces."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

from flexquant.planning import traces
from flexquant.planning.trace import SUFFIX, Request, write_trace

BUILTIN = {"steady": 1.0, "bursty": 0.05}
"""Built-in trace -> burstiness. The traces are otherwise the same, lengths of requests included."""


def make_trace(
    requests: int, rate: float, burstiness: float, input: int, output: int, spread: float, seed: int
) -> list[Request]:
    """Return requests whose arrivals are a gamma process of ``rate`` requests a second.

    As in ``vllm bench serve``, a ``burstiness`` of 1 gives a Poisson process, a smaller one a more bursty
    process, and gaps are scaled to a mean of 1 / ``rate``. Lengths are uniform between (1 - spread) and
    (1 + spread) times ``input`` and ``output`` tokens.
    """
    lengths, gaps = random.Random(seed), random.Random(seed + 1)

    def length(mean: int) -> int:
        return max(1, lengths.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))

    arrivals = [0.0, *accumulate(gaps.gammavariate(burstiness, 1) for _ in range(requests - 1))]
    scale = (requests - 1) / rate / arrivals[-1] if requests > 1 else 0.0
    return [Request(round(arrival * scale, 3), length(input), length(output)) for arrival in arrivals]


def make_builtin(name: str) -> list[Request]:
    """Return a built-in trace: 160 requests, 4 a second, of 512 + 128 tokens, each plus or minus half."""
    return make_trace(160, 4.0, BUILTIN[name], 512, 128, 0.5, seed=7)


if __name__ == "__main__":
    for name in BUILTIN:
        path = Path(traces.__file__).with_name(f"{name}{SUFFIX}")
        path.write_text(write_trace(make_builtin(name)), encoding="utf-8")
