# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How long does a server take to start: eager, compiled for the first time, and compiled before?

    python -m benchmarks.starting MERGED STOCK --output benchmarks/results/starting.json

FlexQuant with all plans of its policy and stock vLLM, each with a cache of its own that is empty at first:
seconds until it answers, and then the milliseconds per token of a request that is decoded alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from examples.vllm_server import VLLMServer, default_environment

STARTS = (("eager", ["--enforce-eager"]), ("compiled, first", []), ("compiled, again", []))
ARGUMENTS = ("--max-model-len", "512", "--max-num-seqs", "32", "--served-model-name", "model")
TOKENS = 64


def token_ms(url: str) -> float:
    """Return the milliseconds per token of the second of two equal answers."""
    body = {"model": "model", "prompt": "The", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as reply:
            reply.read()
        seconds = time.perf_counter() - began
    return 1000 * seconds / TOKENS


def measure(model: Path, options: list[str], folder: Path) -> list[dict[str, Any]]:
    """Start a server in each way, one after the other; return what each took."""
    found = []
    cache = {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    for name, arguments in STARTS:
        environment = {**default_environment(), **cache, "VLLM_PLUGINS": "flexquant"}
        server = VLLMServer(model, [*ARGUMENTS, *arguments, *options], folder / "log", environment)
        try:
            seconds = round(server.wait_until_healthy(), 1)
            found.append({"start": name, "seconds": seconds, "token_ms": round(token_ms(server.url), 2)})
        finally:
            server.stop()
        print(model.name, found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("stock", type=Path, help="one of its variants")
    parser.add_argument("--policy", default="phase-batch", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    merged_options = ["--additional-config", json.dumps({"flexquant": {"policy": args.policy}})]
    servers = {
        f"FlexQuant, {args.policy}": (args.model, merged_options),
        f"stock vLLM, {args.stock.name}": (args.stock, []),
    }
    starts = {}
    for name, (model, options) in servers.items():
        with tempfile.TemporaryDirectory() as folder:
            starts[name] = measure(model, options, Path(folder))
    result = {
        **origin("benchmarks.starting"),
        "starts": starts,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
