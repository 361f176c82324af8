# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantise a 16-bit model into one folder per variant: DIR/w8a8, DIR/w4a16.

Needs llmcompressor (pip install "flexquant[quantize]"), in an environment without vLLM. MODEL is a folder or
a Hugging Face id. Calibrate on text like your users': a text file, a .jsonl file whose records have 'text' or
'messages', or a Hugging Face dataset id.

  flexquant quantize Qwen/Qwen2.5-7B-Instruct --output variants --calibration HuggingFaceH4/ultrachat_200k
  flexquant quantize path/to/model --output variants --calibration chats.jsonl --samples 256 --length 1024
  flexquant quantize path/to/model --output variants --schemes w4a16 --overwrite
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

NAME = "quantize"
HELP = "quantise a 16-bit model into one folder per variant"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id of the 16-bit model")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write the variants into")
    parser.add_argument(
        "--schemes", default="w8a8,w4a16", metavar="NAMES", help="comma-separated (default: w8a8,w4a16)"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE|DATASET",
        help="text file, .jsonl file or dataset id (default: Python's own documentation)",
    )
    parser.add_argument(
        "--samples", type=int, default=128, metavar="N", help="calibration samples (default: 128)"
    )
    parser.add_argument(
        "--length", type=int, default=512, metavar="N", help="tokens in a sample (default: 512)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the samples (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace variants that exist")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from flexquant.quantization.variants import quantize
    from flexquant.merge.staging import format_bytes

    # llmcompressor logs to stdout, which is for the summary alone.
    with contextlib.redirect_stdout(sys.stderr):
        _quiet_llmcompressor()
        variants = quantize(
            args.model,
            args.output,
            [name.strip() for name in args.schemes.split(",") if name.strip()],
            args.calibration,
            samples=args.samples,
            length=args.length,
            seed=args.seed,
            overwrite=args.overwrite,
            progress=lambda message: print(message, file=sys.stderr),
        )
    for v in variants:
        group = f", groups of {v.group_size}" if v.group_size else ""
        smoothed = ", SmoothQuant" if v.smoothed else ""
        print(f"{v.scheme}: {v.folder}, {format_bytes(v.num_bytes)}, {v.seconds:.0f} s{group}{smoothed}")
    return {"output": args.output, "variants": {v.scheme: v.to_json() for v in variants}}


def _quiet_llmcompressor() -> None:
    """Keep llmcompressor's warnings and progress bars; drop its lines on every layer and metric."""
    with contextlib.suppress(ImportError):
        import llmcompressor  # noqa: F401 - sets up its own handler when imported, replaced here
        from loguru import logger

        logger.remove()
        logger.add(
            sys.stderr,
            level="WARNING",
            format="{level}: {message}",
            filter=lambda record: record["level"].name != "METRIC",
        )
