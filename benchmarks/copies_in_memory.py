# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How much memory does a worker take with one copy of the weights, with two, and with a static checkpoint?

    python -m benchmarks.copies_in_memory NAME=MERGED ... --output benchmarks/results/copies-in-memory.json

A process of its own serves each merged checkpoint under each policy, eagerly and with a KV cache of 1 GiB. It
answers a prompt that is long enough for INT8, and reports its memory without the files that it has mapped.
Under ``w4a16`` and ``w8a8`` only that variant is loaded, as from a static checkpoint.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
from pathlib import Path

from benchmarks.layers_in_use import anonymous_mib
from benchmarks.origin import origin
from flexquant.measuring.engine import engine

OPTIONS = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
POLICIES = ("w4a16", "one-copy", "w8a8", "phase-batch")
PROMPT = {"prompt_token_ids": [100 + i % 500 for i in range(512)]}


def measure(folder: Path, policy: str) -> float:
    """Return the MiB of this process once it has answered under ``policy``."""
    with engine(folder, flexquant={"policy": policy}, **OPTIONS) as llm:
        llm.generate([PROMPT], use_tqdm=False)
        return round(anonymous_mib(), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="NAME=DIR of merged checkpoints with w8a8 and w4a16")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, float]] = {}
    for name, _, folder in (model.partition("=") for model in args.models):
        for policy in POLICIES:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
                mib = process.submit(measure, Path(folder), policy).result()
            found.setdefault(name, {})[policy] = mib
            print(name, policy, mib, "MiB", flush=True)
    result = {**origin("benchmarks.copies_in_memory"), "process_mib": found}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
