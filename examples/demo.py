# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve one model in 16 bit, in each static precision and with FlexQuant; show times, memory and answers.

python examples/demo.py MERGED --reference 16_BIT_MODEL --static w8a8=FOLDER w4a16=FOLDER --policy POLICY

`vllm serve` serves one after another, so that they share neither memory nor cores. Decoding is greedy.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from openai import APIConnectionError, OpenAI
from vllm_server import ServerError, vllm_serve

from flexquant.documents.results import table_lines

QUESTIONS = [
    "What is the capital of Japan?",
    "Who invented the telephone?",
    "What is the chemical formula of table salt?",
    "What is the largest desert in the world?",
    "What is the capital of Russia?",
    "What is the chemical formula of carbon dioxide?",
    "What is the capital of Greece?",
    "Who was the first person to walk on the Moon?",
]
"""Some that a model of 135 M weights answers well in 16 bit, and surely.

Of 91 such questions asked, these are among the fifteen whose first twelve tokens are each at least 0.49 nats
ahead of the next likely one (benchmarks/results/demo-questions.json), so that rounding seldom turns them.
"""
SIDE_BY_SIDE = 4
"""Questions at a time: one begins when another is answered, so its prefill meets decode passes."""
ANSWER_TOKENS = 48
REPEATS = 3
"""Times that each kind of request is measured; the median is shown."""
LONG, SHORT = 1024, 16
"""Tokens of a prompt."""
BATCH = 8
"""Answers at once."""
FIRST = f"first token of a prompt of {LONG} tokens, ms"
NEXT = "each next token of one answer, ms"
NEXT_IN_BATCH = f"each next token of {BATCH} answers at once, ms"
CHECKPOINT = "checkpoint, MiB"
FLEXQUANT = "FlexQuant"
SYMBOLS = "#.+o*x"
"""Symbols of the plans, in the order of their first pass; the last one stands for all that follow."""
PHASES = {"prefill": "p", "mixed": "m", "decode": "d"}
WIDTH = 96
BAR = 56
"""Characters of a chart's longest bar."""
NEXT_STEPS = """
Next, take a model of yours:
  an INT4 checkpoint, served as it is   vllm serve MODEL-INT4 --config-format flexquant
  a 16-bit model, served as it is       vllm serve MODEL --config-format flexquant
  two precisions from a 16-bit model    flexquant build MODEL --output MERGED --variants-folder VARIANTS
  how much less time they take          flexquant advise MODEL --device h200"""


@contextmanager
def serve(model: str, *options: str) -> Iterator[OpenAI]:
    """Serve ``model`` with vLLM's ``options``, and yield a client."""
    print(f"vllm serve {model} ...", end="", flush=True)
    started = time.monotonic()
    # Each prompt is measured more than once.
    options = ("--max-model-len", "2048", "--enforce-eager", "--no-enable-prefix-caching", *options)
    if not torch.cuda.is_available():
        options += ("--max-num-seqs", "16")
    with vllm_serve(model, "--served-model-name", "model", *options) as url:
        print(f" {time.monotonic() - started:.0f} s to start,", end="", flush=True)
        started = time.monotonic()
        yield OpenAI(base_url=url, api_key="none")
        print(f" {time.monotonic() - started:.0f} s to answer and to measure", flush=True)


def ask_all(client: OpenAI) -> list[str]:
    """Return the first sentence of the answer to each question."""

    def ask(question: str) -> str:
        answer = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": question}],
            max_tokens=ANSWER_TOKENS,
            temperature=0,
        )
        return first_sentence(answer.choices[0].message.content or "")

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(ask, QUESTIONS))


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()))[0]


def measure(client: OpenAI, model: str) -> dict[str, float]:
    """Return the median milliseconds of each kind of request, and the MiB of the files of ``model``."""
    tokens = random.Random(0).choices(range(5, 100), k=LONG)

    def time_request(prompt: int, answer: int) -> tuple[float, float]:
        """Return the time to the first token (TTFT), and the mean time of each further one (TPOT)."""
        sent = time.monotonic()
        stream = client.completions.create(
            model="model",
            prompt=tokens[:prompt],
            max_tokens=answer,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        times = [time.monotonic() for _ in stream]
        return (times[0] - sent) * 1000, (times[-1] - times[0]) * 1000 / max(1, answer - 1)

    def batch(_: int) -> float:
        with ThreadPoolExecutor(BATCH) as pool:
            return statistics.median(pool.map(lambda _: time_request(SHORT, 32)[1], range(BATCH)))

    return {
        FIRST: statistics.median(time_request(LONG, 1)[0] for _ in range(REPEATS)),
        NEXT: statistics.median(time_request(SHORT, 32)[1] for _ in range(REPEATS)),
        NEXT_IN_BATCH: statistics.median(map(batch, range(REPEATS))),
        CHECKPOINT: sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) / 2**20,
    }


def print_charts(figures: dict[str, dict[str, float]]) -> None:
    """Draw a bar for what each server took: ``figures`` by server and by what was measured."""
    width = max(map(len, figures))
    for quantity in (FIRST, NEXT, NEXT_IN_BATCH, CHECKPOINT):
        largest = max(by_quantity[quantity] for by_quantity in figures.values())
        print(f"\n{quantity}")
        for server, by_quantity in figures.items():
            bar = "█" * max(1, round(by_quantity[quantity] / largest * BAR))
            print(f"  {server:<{width}}  {bar} {by_quantity[quantity]:.{1 if largest < 100 else 0}f}")


def print_answers(answers: dict[str, list[str]]) -> None:
    """Show the answers to each question; servers that answer alike share a line."""
    for number, question in enumerate(QUESTIONS):
        servers: dict[str, list[str]] = {}
        for server, sentences in answers.items():
            servers.setdefault(sentences[number], []).append(server)
        print(f"\nQ: {question}")
        for sentence, names in servers.items():
            print(f"   {'all' if len(names) == len(answers) else ', '.join(names)}: {sentence}")


def print_routes(passes: list[dict]) -> None:
    """Draw every pass in order, one column each, and count them by phase and plan."""
    plans = list(dict.fromkeys(p["plan"] for p in passes))
    symbols = {plan: SYMBOLS[min(i, len(SYMBOLS) - 1)] for i, plan in enumerate(plans)}
    legend = ", ".join(f"{symbol} {plan}" for plan, symbol in symbols.items())
    print(
        f"\nEvery forward pass in order ({', '.join(f'{s} {name}' for name, s in PHASES.items())}; {legend}):"
    )
    for row in (passes[i : i + WIDTH] for i in range(0, len(passes), WIDTH)):
        print(f"phase {''.join(PHASES[p['phase']] for p in row)}")
        print(f"plan  {''.join(symbols[p['plan']] for p in row)}")
    counts = Counter((p["phase"], p["plan"]) for p in passes)
    rows = [[phase, *(str(counts[phase, plan]) for plan in plans)] for phase in PHASES]
    print("", *table_lines([["forward passes", *plans], *rows], numbers=range(1, len(plans) + 1)), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="folder written by 'flexquant merge'")
    parser.add_argument("--reference", metavar="MODEL", help="serve the 16-bit model too")
    parser.add_argument(
        "--static", nargs="+", default=[], metavar="NAME=DIR", help="serve the checkpoint of a variant too"
    )
    parser.add_argument("--policy", help="FlexQuant's policy (default: the checkpoint's)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="keep the record of all passes in this file"
    )
    args = parser.parse_args()
    models = {"16 bit": args.reference} if args.reference else {}
    models |= {f"static {name}": folder for name, _, folder in (s.partition("=") for s in args.static)}
    answers, figures = {}, {}
    for server, model in models.items():
        try:
            with serve(model) as client:
                answers[server], figures[server] = ask_all(client), measure(client, model)
        except (ServerError, APIConnectionError):  # as W4A16 on a CPU without AVX512
            print(f" and ended: vLLM alone does not serve it here, as 'vllm serve {model}' tells in full")
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace or Path(folder) / "routes.jsonl"
        settings = {"trace": str(trace.absolute())} | ({"policy": args.policy} if args.policy else {})
        with serve(args.checkpoint, "--additional-config", json.dumps({"flexquant": settings})) as client:
            answers[FLEXQUANT] = ask_all(client)
            header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
            figures[FLEXQUANT] = measure(client, args.checkpoint)
    print_answers(answers)
    print(f"\n{FLEXQUANT} answered under the policy {header['policy']}.")
    print_routes(passes)
    print_charts(figures)
    print(NEXT_STEPS)


if __name__ == "__main__":
    main()
