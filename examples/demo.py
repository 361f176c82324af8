# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The whole way on a merged checkpoint: serve it, ask it things, show which plan ran when.

python examples/demo.py MERGED_CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from openai import OpenAI
from vllm_server import vllm_serve

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about the sea.",
]
PROMPT = "The three laws of motion were formulated by"


def ask(client: OpenAI, model: str) -> None:
    """Send chat requests side by side, so that passes of all phases occur, then a completion."""

    def chat(question: str) -> str:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=48,
            temperature=0,
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        for question, answer in zip(QUESTIONS, pool.map(chat, QUESTIONS), strict=True):
            print(f"\nQ: {question}\nA: {answer.strip()}")
    completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
    print(f"\n{PROMPT}{completion.choices[0].text}")


def report(trace: Path) -> None:
    header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    counts = Counter((p["phase"], p["plan"]) for p in passes)
    print(f"\nPolicy: {header['policy']}\n\n{'phase':<10}{'plan':<24}{'forward passes':>14}")
    for (phase, plan), count in sorted(counts.items()):
        print(f"{phase:<10}{plan:<24}{count:>14}")
    print(f"\n{'weights':<34}{'MiB':>14}")
    for name, size in header["weight_bytes"].items():
        print(f"{name:<34}{size / 2**20:>14.1f}")
    print(f"{'the model in 16 bit':<34}{header['weight_bytes_in_16_bit'] / 2**20:>14.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="folder written by 'flexquant merge'")
    checkpoint = parser.parse_args().checkpoint
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "routes.jsonl"
        options = ["--additional-config", json.dumps({"flexquant": {"trace": str(trace)}})]
        options += ["--max-model-len", "2048", "--enforce-eager"]
        if not torch.cuda.is_available():
            options += ["--max-num-seqs", "16"]
        print(f"Starting vllm serve {checkpoint} ...", flush=True)
        with vllm_serve(checkpoint, *options) as url:
            ask(OpenAI(base_url=url, api_key="none"), checkpoint)
        report(trace)


if __name__ == "__main__":
    main()
