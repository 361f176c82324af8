# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What servers are asked: batches that arrive at once, requests one after another, and streams at a rate."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from flexquant.errors import FlexQuantError

BASE_SEED = 1000
WRITTEN = re.compile(r"(\d+)x(\d+)\+(\d+)(?:@(\d+(?:\.\d+)?)|/(\d+))?(?:~(0?\.\d+))?")


@dataclass(frozen=True)
class Workload:
    """Requests with random prompts: a batch that arrives at once, unless ``rate`` or ``at_once`` is given."""

    requests: int
    input: int
    """Tokens of a prompt; the mean if there is a ``spread``."""
    output: int
    """Tokens of an answer, which never ends earlier; the mean if there is a ``spread``."""
    rate: float | None = None
    """Requests a second, with Poisson arrivals."""
    spread: float = 0.0
    """Lengths are uniform between (1 - spread) and (1 + spread) times the mean."""
    at_once: int | None = None
    """Most requests that are under way at once: as one ends the next arrives."""

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read what :attr:`name` writes; raise FlexQuantError for anything else."""
        match = WRITTEN.fullmatch(text)
        given = [float(number) for number in match.groups()[:5] if number] if match else [0.0]
        if match is None or 0 in given or given[2] < 2:
            raise FlexQuantError(
                f"'{text}' is not a workload; write REQUESTSxINPUT+OUTPUT, e.g. 8x1024+128 for a batch of 8, "
                "@RATE~SPREAD for a stream, e.g. 200x1024+256@10~0.5, and /1 for requests one by one, e.g. "
                "30x128+16/1; no number is 0, and an answer has two tokens or more"
            )
        rate, at_once = float(match[4]) if match[4] else None, int(match[5]) if match[5] else None
        return cls(int(match[1]), int(match[2]), int(match[3]), rate, float(match[6] or 0), at_once)

    @property
    def name(self) -> str:
        """Return the workload as text: requests x prompt + answer, how they arrive, ~ spread of length."""
        arrival = "" if self.rate is None else f"@{self.rate:g}"
        arrival += "" if self.at_once is None else f"/{self.at_once}"
        spread = f"~{self.spread:g}" if self.spread else ""
        return f"{self.requests}x{self.input}+{self.output}{arrival}{spread}"

    @property
    def longest(self) -> int:
        """Return the most tokens of one request, prompt and answer."""
        return int((self.input + self.output) * (1 + self.spread)) + 1

    @property
    def most_at_once(self) -> int:
        """Return the most requests that can be under way at once."""
        return self.at_once or self.requests

    def describe(self) -> dict[str, Any]:
        """Return the fields; ``at_once`` only if it is set, as older cells have none."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("at_once", None)}

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
        if self.at_once is not None:
            options["max-concurrency"] = self.at_once
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [*arguments, "--ignore-eos", "--save-detailed", "--disable-tqdm"]
