# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What does W8A8 lose where it is nested in INT4 weights, for pairs that were made in different ways?

    python -m benchmarks.nesting NAME=W8A8,W4A16 ... --reference MODEL --output FILE

It runs in the environment of llmcompressor, .venv/quantize. Losses are those that `flexquant build` measures.
Pairs in FILE are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.result import origin, write_result
from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint
from flexquant.quantization.loss import Reference, measure_loss, read_reference
from flexquant.quantization.oneshot import load_quantized, load_whole
from flexquant.quantization.source_model import read_source


def losses_of(folder: Path, reference: Reference) -> dict[str, Any]:
    """Return what a quantised checkpoint lost, by kind of text."""
    losses = measure_loss(load_quantized(folder), reference)
    return {kind: loss.model_dump() for kind, loss in losses.items()}


def measure(w8a8: Path, w4a16: Path, reference: Reference) -> dict[str, Any]:
    """Return what nesting one pair gives: bits, what changed, what was lost; or why it is refused."""
    with TemporaryDirectory() as work:
        merged, split = Path(work) / "merged", Path(work) / "w8a8"
        started = time.monotonic()
        try:
            report = merge_checkpoints({"w8a8": w8a8, "w4a16": w4a16}, merged, nested="near").to_json()
        except FlexQuantError as e:
            return {"refused": str(e)}
        seconds = time.monotonic() - started
        split_checkpoint(merged, "w8a8", split)
        return {
            "seconds": round(seconds, 1),
            "variants": {name: found["scheme"] for name, found in report["variants"].items()},
            "nested": report["variants"]["w8a8"]["nested"],
            "losses": {"w8a8": losses_of(w8a8, reference), "nested": losses_of(split, reference)},
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="+", metavar="NAME=W8A8,W4A16")
    parser.add_argument("--reference", type=Path, required=True, metavar="MODEL", help="folder in 16 bit")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    document = {**origin("benchmarks.nesting"), "pairs": {}}
    if args.output.exists():
        document["pairs"] = json.loads(args.output.read_text(encoding="utf-8"))["pairs"]
    reference = read_reference(load_whole(read_source(args.reference)), load_tokenizer(args.reference))
    for pair in args.pairs:
        name, _, folders = pair.partition("=")
        if name not in document["pairs"]:
            document["pairs"][name] = measure(*map(Path, folders.split(",")), reference)
            write_result(args.output, document)
        print(name, json.dumps(document["pairs"][name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
