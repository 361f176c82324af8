# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``vllm bench serve``, run by its own code in a process that stays: importing vLLM takes longer than a cell.

A request is the list of its command-line arguments; the reply is the part of its result that is kept, with
``tpots`` added: for each request the seconds a token after the first. An empty list only imports vLLM.
"""

from __future__ import annotations

import functools
import gc
import re
from typing import Any

from benchmarks.speed.worker import answer_requests

KEPT = re.compile(
    r"duration|completed|total_(input|output)_tokens|(request|output|total_token)_throughput|ttfts|output_lens|"
    r"\w+_(ttft|tpot|itl)_ms"
)


@functools.cache
def parser() -> Any:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = FlexibleArgumentParser()
    add_cli_args(made)
    return made


def bench(arguments: list[str]) -> dict[str, Any]:
    from vllm.benchmarks.serve import main

    options = parser()
    if not arguments:
        return {}
    try:
        found = main(options.parse_args(arguments))
    finally:
        # vLLM freezes the heap at every call, with what earlier calls left there: a tokenizer of 50 MB each.
        gc.unfreeze()
        gc.collect()
    if found["failed"]:
        error = next(filter(None, found["errors"]), "no reason given").strip().splitlines()[-1]
        raise RuntimeError(f"{found['failed']} of {found['num_prompts']} requests failed: {error}")
    kept = {key: plain(value) for key, value in found.items() if KEPT.fullmatch(key)}
    kept["tpots"] = [
        sum(gaps) / max(1, tokens - 1)
        for gaps, tokens in zip(found["itls"], found["output_lens"], strict=True)
    ]
    return kept


def plain(value: Any) -> Any:
    """Return numpy's numbers as Python's."""
    return value.item() if hasattr(value, "item") else value


if __name__ == "__main__":
    answer_requests(bench)
