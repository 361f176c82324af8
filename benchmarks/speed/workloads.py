# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What servers are asked: batches that arrive at once, and streams of requests at a rate."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from flexquant.errors import FlexQuantError

BASE_SEED = 1000
WRITTEN = re.compile(r"(\d+)x(\d+)\+(\d+)(?:@(\d+(?:\.\d+)?))?(?:~(0?\.\d+))?")


@dataclass(frozen=True)
class Workload:
    """Requests with random prompts; a workload without ``rate`` is one batch that arrives at once."""

    requests: int
    input: int
    """Tokens of a prompt; the mean if there is a ``spread``."""
    output: int
    """Tokens of an answer, which never ends earlier; the mean if there is a ``spread``."""
    rate: float | None = None
    """Requests a second, with Poisson arrivals."""
    spread: float = 0.0
    """Lengths are uniform between (1 - spread) and (1 + spread) times the mean."""

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read what :attr:`name` writes; raise FlexQuantError for anything else."""
        match = WRITTEN.fullmatch(text)
        if match is None or 0 in [float(number) for number in match.groups()[:4] if number]:
            raise FlexQuantError(
                f"'{text}' is not a workload; write REQUESTSxINPUT+OUTPUT, e.g. 8x1024+128 for a batch of 8, "
                "and @RATE~SPREAD for a stream, e.g. 200x1024+256@10~0.5"
            )
        rate = float(match[4]) if match[4] else None
        return cls(int(match[1]), int(match[2]), int(match[3]), rate, float(match[5] or 0))

    @property
    def name(self) -> str:
        """Return the workload as text: requests x prompt + answer @ requests a second ~ spread of length."""
        rate = "" if self.rate is None else f"@{self.rate:g}"
        return f"{self.requests}x{self.input}+{self.output}{rate}" + (
            f"~{self.spread:g}" if self.spread else ""
        )

    @property
    def longest(self) -> int:
        """Return the most tokens of one request, prompt and answer."""
        return int((self.input + self.output) * (1 + self.spread)) + 1

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def bench_arguments(self, url: str, model: str, tokenizer: str, round_number: int) -> list[str]:
        """Return the arguments of ``vllm bench serve``; every subject gets the same requests in a round."""
        options = {
            "backend": "openai",
            "base-url": url,
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random",
            "random-input-len": self.input,
            "random-output-len": self.output,
            "random-range-ratio": self.spread,
            "num-prompts": self.requests,
            "request-rate": "inf" if self.rate is None else self.rate,
            "seed": BASE_SEED + round_number,
            "temperature": 0,
            "percentile-metrics": "ttft,tpot,itl",
            "metric-percentiles": "50,90,99",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [*arguments, "--ignore-eos", "--save-detailed", "--disable-tqdm"]
