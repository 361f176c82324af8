# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ask a merged checkpoint and its 16-bit model the same questions, and draw which plan ran when.

python examples/demo.py MERGED_CHECKPOINT --reference 16_BIT_MODEL

Each is served by `vllm serve` in turn, so that they share neither memory nor cores. Decoding is greedy.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from openai import OpenAI

from flexquant.measuring.server import vllm_serve

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
"""Requests at a time: a question begins when another one is answered, so its prefill meets decode passes."""
ANSWER_TOKENS = 48
SYMBOLS = "#.+o*x"
"""Symbols of the plans, in the order of their first pass; the last one stands for all that follow."""
PHASES = {"prefill": "p", "mixed": "m", "decode": "d"}
WIDTH = 96


@dataclass(frozen=True)
class Answer:
    text: str
    first_token: float
    """Seconds from the request to its first token (TTFT)."""
    per_token: float
    """Mean seconds between tokens after the first (TPOT)."""


def ask(client: OpenAI, model: str, question: str) -> Answer:
    """Send one chat request, and time its tokens as they come."""
    sent = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, times, tokens = [], [], 1
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
            times.append(time.monotonic())
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    times = times or [time.monotonic()]
    return Answer(
        first_sentence("".join(pieces)),
        times[0] - sent,
        (times[-1] - times[0]) / max(1, tokens - 1),
    )


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()))[0]


def serve_and_ask(model: str, *options: str) -> list[Answer]:
    """Return the answers of ``model`` to all questions, served with vLLM's ``options``."""
    print(f"vllm serve {model} ...", end="", flush=True)
    started = time.monotonic()
    options = ("--max-model-len", "2048", "--enforce-eager", *options)
    if not torch.cuda.is_available():
        options += ("--max-num-seqs", "16")
    with vllm_serve(model, *options) as url:
        print(f" {time.monotonic() - started:.0f} s to start,", end="", flush=True)
        started = time.monotonic()
        client = OpenAI(base_url=url, api_key="none")
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            answers = list(pool.map(lambda question: ask(client, model, question), QUESTIONS))
        print(f" {time.monotonic() - started:.0f} s to answer {len(QUESTIONS)} questions", flush=True)
    return answers


def print_answers(answers: list[Answer], reference: list[Answer] | None) -> None:
    if reference is None:
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"Q: {question}\n   FlexQuant: {answer.text}")
        return
    same = 0
    for question, answer, expected in zip(QUESTIONS, answers, reference, strict=True):
        print(f"Q: {question}")
        if answer.text == expected.text:
            same += 1
            print(f"   both:      {answer.text}")
        else:
            print(f"   16 bit:    {expected.text}\n   FlexQuant: {answer.text}")
    print(f"{same} of {len(QUESTIONS)} answers begin with the same sentence, word for word.")


def print_times(served: dict[str, list[Answer]]) -> None:
    print(f"\n{'median of all requests':<30}{'first token, ms':>18}{'per further token, ms':>24}")
    for name, answers in served.items():
        first = statistics.median(a.first_token for a in answers) * 1000
        further = statistics.median(a.per_token for a in answers) * 1000
        print(f"{name:<30}{first:>18.0f}{further:>24.1f}")


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
    widths = [max(10, len(plan) + 2) for plan in plans]
    print(f"\n{'forward passes':<16}" + "".join(f"{p:>{w}}" for p, w in zip(plans, widths, strict=True)))
    for phase in PHASES:
        cells = zip((counts[phase, plan] for plan in plans), widths, strict=True)
        print(f"{phase:<16}" + "".join(f"{count:>{w}}" for count, w in cells))


def print_memory(header: dict) -> None:
    sizes = header["weight_bytes"]
    parts = " + ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
    in_16_bit = header["weight_bytes_in_16_bit"]
    print(f"\nWeights in MiB: {parts} = {sum(sizes.values()) / 2**20:.1f}; in 16 bit {in_16_bit / 2**20:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="folder written by 'flexquant merge'")
    parser.add_argument("--reference", metavar="MODEL", help="16-bit model to ask the same questions")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="keep the record of all passes in this file"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace or Path(folder) / "routes.jsonl"
        reference = serve_and_ask(args.reference) if args.reference else None
        config = json.dumps({"flexquant": {"trace": str(trace.absolute())}})
        answers = serve_and_ask(args.checkpoint, "--additional-config", config)
        header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    print_answers(answers, reference)
    print_times(
        ({"16 bit": reference} if reference else {}) | {f"FlexQuant, policy {header['policy']}": answers}
    )
    print_routes(passes)
    print_memory(header)


if __name__ == "__main__":
    main()
