# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What do the metrics, the trace and the status page cost those who are served?

    python -m benchmarks.watching MERGED --output benchmarks/results/watching.json

The results are two ratios over paired rounds, each of one process, so that no two processes differ by chance:

- ``worker``: one engine either counts, times and traces its passes and follows requests, or does none of
  that.
- ``server``: one ``vllm serve`` does all of that. A status page (a request every two seconds) and a
  Prometheus (``/metrics`` every five seconds) either ask it ten times as often as usual, or not at all. A
  tenth of what the ratio is above 1 is what they cost: ``once`` has it, with its interval.

Both answer one request at a time: the shortest passes, on which a fixed cost weighs most. Watched and
unwatched passes of the engine, and requests to the server, take turns within a round, since a machine's
speed drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.turns import PASSES, Decoding, add_effort, compare_in_turns, effort_of
from examples.vllm_server import vllm_serve
from flexquant.measuring.comparison import Effort
from flexquant.measuring.engine import engine

PROMPT = list(range(100, 116))
SERVER_TOKENS = 8
PAGE_SECONDS, SCRAPE_SECONDS = 2.0, 5.0
TIMES_AS_OFTEN = 10


def measure_worker(model: Path, effort: Effort) -> dict[str, Any]:
    """Compare an engine that counts, times and traces its passes with the same engine when it does not."""
    from flexquant.serving.worker.pass_records import PassRecords

    with tempfile.TemporaryDirectory() as folder:
        options = {"trace": str(Path(folder) / "trace.jsonl"), "requests": True}
        with engine(model, flexquant=options, max_model_len=512, enable_prefix_caching=False) as llm:
            llm.collective_rpc("flexquant_follow_requests")
            (served,) = llm.apply_model(lambda model: model)
            names, written, silent = served.observer.request_names, served.records, PassRecords(None, None)
            if written.counted() is None:
                raise RuntimeError("this engine does not count, so that there is nothing to compare")

            decoding = Decoding(llm)

            def watched(on: bool) -> None:
                decoding.prefill()
                served.records = written if on else silent
                served.observer.request_names = names if on else None

            return compare_in_turns(decoding.step, watched, effort, PASSES)


def read(url: str) -> None:
    with urllib.request.urlopen(url, timeout=60) as reply:
        reply.read()


@contextmanager
def watcher(root: str) -> Iterator[Callable[[bool], None]]:
    """Yield a switch for what an open page and a Prometheus ask of the server."""
    on, ended = threading.Event(), threading.Event()

    def ask_again(url: str, every: float) -> None:
        while not ended.is_set():
            if on.wait(0.1):
                read(url)
                ended.wait(every)

    asked = (
        (f"{root}/flexquant", PAGE_SECONDS / TIMES_AS_OFTEN),
        (f"{root}/metrics", SCRAPE_SECONDS / TIMES_AS_OFTEN),
    )
    with ThreadPoolExecutor(len(asked)) as pool:
        under_way = [pool.submit(ask_again, *what) for what in asked]
        try:
            yield lambda wanted: on.set() if wanted else on.clear()
        finally:
            ended.set()
            on.set()
        for future in under_way:
            future.result()


def measure_server(model: Path, effort: Effort) -> dict[str, Any]:
    """Compare a server that is watched with the same server when nobody looks."""
    os.environ["VLLM_PLUGINS"] = "flexquant"  # without it vLLM serves no plugin's routes
    with tempfile.TemporaryDirectory() as folder:
        options = {"flexquant": {"trace": str(Path(folder) / "trace.jsonl"), "requests": True}}
        arguments = ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "512"]
        arguments += ["--served-model-name", "merged", "--additional-config", json.dumps(options)]
        body = {"model": "merged", "prompt": PROMPT, "max_tokens": SERVER_TOKENS, "ignore_eos": True}
        with vllm_serve(model, *arguments) as url:
            request = urllib.request.Request(
                f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )

            def serve() -> None:
                with urllib.request.urlopen(request, timeout=600) as reply:
                    reply.read()

            with watcher(url.removesuffix("/v1")) as watched:
                # Asked ten times as often, so an interval ten times as wide tells the cost as closely.
                found = compare_in_turns(
                    serve, watched, replace(effort, width=TIMES_AS_OFTEN * effort.width), turns=1
                )
    once = {name: 1 + (found[name] - 1) / TIMES_AS_OFTEN for name in ("ratio", "low", "high")}
    return found | {"once": once}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    add_effort(parser)
    args = parser.parse_args()
    effort = effort_of(args)
    result = {
        **origin("benchmarks.watching"),
    }
    for part, measure_part in (("worker", measure_worker), ("server", measure_server)):
        result[part] = measure_part(args.model, effort)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{part}: {result[part]['words']}; ratio {result[part]['ratio']:.4f}", flush=True)


if __name__ == "__main__":
    main()
