# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Let a 16-bit model write the text that its own quantisation is calibrated on, where there is no other.

python examples/self_calibration.py MODEL OUTPUT.jsonl
flexquant build MODEL --output merged --calibration OUTPUT.jsonl

Half of the documents are answers to requests, the others go on from common words, all sampled at temperature
1 from one seed. Runs in the serving environment, where `vllm serve` writes all of them side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI

from flexquant.measuring.server import vllm_serve

REQUESTS = [
    "Explain in simple words how {} works.",
    "What should I know about {}?",
    "Write a short story about {}.",
    "Name some important facts about {}.",
    "Write a letter to a friend about {}.",
    "How did {} change over the last hundred years?",
    "Give me advice on {}, step by step.",
    "Summarise the history of {}.",
]
TOPICS = ["a bakery", "electricity", "the railway", "chess", "the human heart", "gardening", "money", "music"]
OPENINGS = ["The", "In", "A", "When", "It", "For", "This", "One", "Many", "After", "We", "There", "How", "I"]


def write(client: OpenAI, model: str, number: int, tokens: int, seed: int) -> dict[str, Any]:
    """Return the record of document ``number``: ``messages`` if it is even, ``text`` otherwise."""
    draw = random.Random(f"{seed}, {number}")
    sampling: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 1, "seed": seed + number}
    if number % 2:
        opening = draw.choice(OPENINGS)
        return {"text": opening + client.completions.create(prompt=opening, **sampling).choices[0].text}
    request = {"role": "user", "content": draw.choice(REQUESTS).format(draw.choice(TOPICS))}
    answer = client.chat.completions.create(messages=[request], **sampling).choices[0].message.content
    return {"messages": [request, {"role": "assistant", "content": answer}]}


def dtype() -> str:
    """Return what to compute in: on a CPU that emulates bfloat16, 32 bit takes a third of the time."""
    emulates = not torch.cuda.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "float32" if emulates else "auto"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or Hugging Face id of a 16-bit model with a chat template")
    parser.add_argument("output", type=Path, help=".jsonl file to write")
    parser.add_argument("--documents", type=int, default=64, help="answers and texts in all (%(default)s)")
    parser.add_argument("--tokens", type=int, default=192, help="most tokens of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws requests and text (%(default)s)")
    args = parser.parse_args()

    print(f"{args.model} writes {args.documents} texts to calibrate on ...", end="", flush=True)
    started = time.monotonic()
    with vllm_serve(args.model, "--max-model-len", "2048", "--enforce-eager", "--dtype", dtype()) as url:
        client = OpenAI(base_url=url, api_key="none")
        with ThreadPoolExecutor(args.documents) as pool:
            numbers = range(args.documents)
            records = list(pool.map(lambda n: write(client, args.model, n, args.tokens, args.seed), numbers))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f" {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
