# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A server under load while its policy is changed: does every request get what the recorded routes give it?

    python -m benchmarks.load MERGED --stock MODEL --output benchmarks/results/load.json

``vllm bench serve`` sends prompts of mixed lengths, cut from the pages of this project, to a ``vllm serve``,
as many at a time as it takes; meanwhile the given policies follow one another. Then the benchmark asks: did a
request fail? Do FlexQuant's counters add up to the tokens that vLLM counted? Does memory grow more than that
of vLLM without FlexQuant, which serves ``--stock`` under the same load? Does an engine that computes a sample
of the answers alone, each token by the recorded plan, find the same tokens? Batches of another size round
otherwise, so an answer may differ where two tokens are nearly as likely; the result has the difference of
their log-probabilities for every answer that does. Prefix caching is off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from benchmarks.process_memory import MemoryOverTime
from benchmarks.recorded_routes import Answer, compare_answers
from examples.vllm_server import VLLMServer
from flexquant.policy.rules import load_policy
from flexquant.serving.frontend.client import ADMIN_KEY, apply_policy

PAGES = Path(__file__).parents[1]
POLICIES = ("phase", "w8a8", "phase-batch", "w4a16", "phase-batch-layer")
CONCURRENCY = 128
"""Requests under way, twice as many as are computed at a time."""
MAX_LENGTH = 1024
KV_CACHE_BYTES = 512 * 2**20
"""Size of the KV cache, which holds twice the tokens that are under way.

Its pages count as memory only once they are used: with a larger cache the memory would grow for a long time.
"""


def make_prompts(number: int, seed: int) -> list[dict[str, Any]]:
    """Return ``number`` prompts of 4 to 120 words, each with 4 to 64 tokens to answer."""
    words = " ".join(page.read_text("utf-8") for page in sorted(PAGES.glob("*/README.md"))).split()
    draw = random.Random(seed)
    prompts = []
    for _ in range(number):
        length, start = draw.randint(4, 120), draw.randrange(len(words) - 120)
        prompts.append(
            {"prompt": " ".join(words[start : start + length]), "output_tokens": draw.randint(4, 64)}
        )
    return prompts


def scrape(url: str) -> dict[str, float]:
    """Return a server's counters, each summed over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if match := re.fullmatch(r"(\w+:\w+)(?:\{.*\})? (\S+)", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def send(
    url: str, model: str, prompts: Path, number: int, result: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start ``vllm bench serve`` on the prompts."""
    values = {
        "backend": "openai",
        "base-url": url,
        "model": model,
        "dataset-name": "custom",
        "dataset-path": prompts,
        "custom-output-len": -1,
        "num-prompts": number,
        "max-concurrency": CONCURRENCY,
        "request-id-prefix": "load-",
        "temperature": 0,
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    arguments += ["--disable-shuffle", "--skip-chat-template", "--ignore-eos", "--disable-tqdm"]
    arguments += ["--save-result", "--save-detailed"]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def change_policies(
    url: str, client: subprocess.Popen[bytes], policies: Sequence[str], changes: int, passes: Path, total: int
) -> list[dict[str, Any]]:
    """Have one policy follow another while the client runs; return what each change did.

    The changes are spread evenly over the ``total`` tokens of the load, which the trace ``passes`` counts.
    """
    done: list[dict[str, Any]] = []
    tokens = 0
    with passes.open(encoding="utf-8") as trace:
        while client.poll() is None and len(done) < changes:
            tokens += sum(
                json.loads(line).get("scheduled_tokens", 0) for line in trace if line.endswith("\n")
            )
            if tokens < (len(done) + 1) * total / (changes + 1):
                time.sleep(0.2)
                continue
            name = policies[(len(done) + 1) % len(policies)]
            told = apply_policy(url, load_policy(name))
            done.append({"policy": name, "seconds": told["seconds"], "routes": len(told["routes"])})
    return done


def read_answers(trace: Path, prompts: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[Answer]:
    """Return every request's prompt and text with the plan of each of its tokens, in order."""
    runs: dict[int, list[tuple[str, int]]] = {}
    for line in trace.read_text("utf-8").splitlines():
        record = json.loads(line)
        for name, tokens in record.get("requests", {}).items():
            if match := re.match(r"cmpl-load-(\d+)-0", name):
                runs.setdefault(int(match[1]), []).append((record["plan"], tokens))
    return [
        Answer(prompt["prompt"], text, prompt["output_tokens"], runs[number])
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts = make_prompts(args.requests, args.seed)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    trace = folder / "trace.jsonl"
    options = {"policy": args.policies[0], "trace": str(trace), "requests": True}
    words = sum(len(prompt["prompt"].split()) + prompt["output_tokens"] for prompt in prompts)
    os.environ[ADMIN_KEY] = "load"
    with serve(args.model, folder, "--additional-config", json.dumps({"flexquant": options})) as server:
        before = scrape(server.url)
        with under_load(server, args.model, args.requests, folder) as (client, memory):
            changes = change_policies(server.url, client, args.policies, args.changes, trace, words)
        after = scrape(server.url)
    found = json.loads((folder / "found.json").read_text())
    if found["failed"]:
        raise RuntimeError(f"requests failed: {sorted(set(filter(None, found['errors'])))}")
    counted = {name: after[name] - before.get(name, 0.0) for name in after}
    answers = read_answers(trace, prompts, found["generated_texts"])
    sample = random.Random(args.seed).sample(answers, min(args.compare, len(answers)))
    return {
        "requests": {"sent": args.requests, "completed": found["completed"], "failed": found["failed"]},
        "seconds": found["duration"],
        "changes": changes,
        "counters": check_counters(counted, trace),
        "memory": memory.told(),
        "memory_of_stock_vllm": measure_stock(args.stock, args.requests, folder) if args.stock else None,
        "answers": compare_answers(args.model, sample, plans_in(trace), MAX_LENGTH),
    }


def measure_stock(model: Path, requests: int, folder: Path) -> dict[str, Any]:
    """Return the memory of a ``vllm serve`` without FlexQuant under the same load."""
    with serve(model, folder) as server, under_load(server, model, requests, folder) as (_, memory):
        pass
    return memory.told()


@contextmanager
def serve(model: Path, folder: Path, *options: str) -> Iterator[VLLMServer]:
    """Serve a model for as long as the block runs."""
    arguments = ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", str(MAX_LENGTH)]
    arguments += ["--max-num-seqs", str(CONCURRENCY // 2), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    environment = {**os.environ, "VLLM_PLUGINS": "flexquant"}
    server = VLLMServer(model, [*arguments, *options], folder / f"{model.name}-server.log", environment)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


@contextmanager
def under_load(
    server: VLLMServer, model: Path, requests: int, folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], MemoryOverTime]]:
    """Send the prompts while the block runs and until they are answered, and watch the memory meanwhile."""
    log = folder / "bench.log"
    memory = MemoryOverTime(server.processes.pid)
    memory.start()
    client = send(server.url, str(model), folder / "prompts.jsonl", requests, folder / "found.json", log)
    try:
        yield client, memory
        code = client.wait()
    finally:
        client.kill()
        memory.stop()
    if code:
        raise RuntimeError(f"vllm bench serve failed: {log.read_text()[-2000:]}")


def plans_in(trace: Path) -> dict[str, list[str]]:
    """Return the plans of all policies in a trace, by name."""
    plans: dict[str, list[str]] = {}
    for line in trace.read_text("utf-8").splitlines():
        plans |= json.loads(line).get("plans", {})
    return plans


def check_counters(counted: dict[str, float], trace: Path) -> dict[str, float]:
    """Return what FlexQuant, its trace and vLLM have counted: passes, and tokens that were computed.

    vLLM counts prompt tokens and generated tokens; the last token of an answer is never computed.
    """
    passes = [json.loads(line) for line in trace.read_text("utf-8").splitlines()]
    passes = [record for record in passes if "phase" in record]
    return {
        "passes": counted["flexquant:forward_total"],
        "passes_in_trace": len(passes),
        "tokens": counted["flexquant:tokens_total"],
        "tokens_in_trace": sum(record["scheduled_tokens"] for record in passes),
        "tokens_by_vllm": counted["vllm:prompt_tokens_total"]
        + counted["vllm:generation_tokens_total"]
        - counted["vllm:request_success_total"],
        "steps_by_vllm": counted["vllm:iteration_tokens_total_count"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument(
        "--stock", type=Path, metavar="MODEL", help="served without FlexQuant, to compare memory with"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--changes", type=int, default=20, help="changes of the policy (%(default)s)")
    parser.add_argument("--compare", type=int, default=100, help="answers to compute again (%(default)s)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="NAME|FILE")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(args, Path(folder))
    result = {
        **origin("benchmarks.load"),
        **measured,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
