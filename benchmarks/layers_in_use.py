# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How much memory does a plan take that has few layers of one variant?

    python -m benchmarks.layers_in_use MERGED --label after --output benchmarks/results/layers-in-use.json

A process of its own serves each plan, eagerly and with a KV cache of 1 GiB, and reports its memory without
the files that it has mapped. The benchmark adds the measurements to the file under the label, so that two
releases can be compared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import gc
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from flexquant.measuring.engine import engine

OPTIONS = {"max_model_len": 512, "max_num_seqs": 4}
FEW = 4
"""Number of layers that the mixed plan takes from the first variant."""


def anonymous_mib() -> float:
    """Return the anonymous memory of this process in MiB: the memory that no file backs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def measure(folder: Path, use: Any) -> dict[str, Any]:
    """Serve a model by one plan in this process; return the process's memory and the size of its weights."""
    document = {"schema": "flexquant.policy/v1", "rules": [{"use": use}]}
    with tempfile.TemporaryDirectory() as work:
        policy, trace = Path(work, "policy.json"), Path(work, "trace.jsonl")
        policy.write_text(json.dumps(document), encoding="utf-8")
        with engine(folder, flexquant={"policy": str(policy), "trace": str(trace)}, **OPTIONS) as llm:
            llm.generate(["The"], use_tqdm=False)
            mib = anonymous_mib()
        header = json.loads(trace.read_text(encoding="utf-8").splitlines()[0])
    weights = {name: round(size / 2**20, 1) for name, size in header["weight_bytes"].items()}
    return {"process_mib": round(mib, 1), "weights_mib": weights}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint")
    parser.add_argument("--variants", default="w8a8,w4a16", help="two of its variants (default: %(default)s)")
    parser.add_argument("--label", required=True, help="what the measurements are called in the file")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write, or to add to")
    args = parser.parse_args()
    few, most = args.variants.split(",")
    layers = f"0-{FEW - 1}"
    plans = {most: most, f"{layers} in {few}": {"default": most, "layers": {layers: few}}, few: few}
    spawn = multiprocessing.get_context("spawn")
    found = {}
    for name, use in plans.items():
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
            found[name] = process.submit(measure, args.model, use).result()
        print(name, found[name], flush=True)
    runs = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    runs[args.label] = {**origin("benchmarks.layers_in_use"), "plans": found}
    args.output.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
