# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``vllm bench serve``, run by its own code in a process that stays: importing vLLM takes longer than a cell.

A request is the list of its command-line arguments; the reply is the part of its result that is kept, with
``tpots`` added: for each request the seconds a token after the first. An empty list only imports vLLM. With
:data:`AS_IDS` prompts are sent as token ids, to servers that do not read text as the model's tokenizer does.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from benchmarks.speed.worker import answer_requests

KEPT = re.compile(
    r"duration|completed|total_(input|output)_tokens|(request|output|total_token)_throughput|ttfts|output_lens|"
    r"\w+_(ttft|tpot|itl)_ms"
)

AS_IDS = "--as-ids"
BACKEND = "openai"


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
    args = options.parse_args([argument for argument in arguments if argument != AS_IDS])
    try:
        with prompts_as_ids(args.tokenizer) if AS_IDS in arguments else nullcontext():
            found = main(args)
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


@contextmanager
def prompts_as_ids(tokenizer: str) -> Iterator[None]:
    """Have prompts sent as token ids, and count an answer as long as it was asked to be.

    llama.cpp tells the number of tokens where vLLM's client does not look, and ends no answer sooner.
    """
    from tokenizers import Tokenizer
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS

    encode = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode
    ask: Callable[..., Awaitable[Any]] = ASYNC_REQUEST_FUNCS[BACKEND]

    async def ask_with_ids(request_func_input: Any, *args: Any, **kwargs: Any) -> Any:
        ids = encode(request_func_input.prompt).ids
        found = await ask(replace(request_func_input, prompt=ids), *args, **kwargs)
        found.output_tokens = found.output_tokens or request_func_input.output_len
        return found

    ASYNC_REQUEST_FUNCS[BACKEND] = ask_with_ids
    try:
        yield
    finally:
        ASYNC_REQUEST_FUNCS[BACKEND] = ask


def plain(value: Any) -> Any:
    """Return numpy's numbers as Python's."""
    return value.item() if hasattr(value, "item") else value


if __name__ == "__main__":
    answer_requests(bench)
