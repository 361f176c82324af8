# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Advise which way to serve a model on a device, before it is quantised: stock vLLM or FlexQuant, and how.

Of the model only config.json is read. Latencies, memory and the choice come from a cost model that counts
bytes, operations and overheads of the passes that requests take. One copy is a checkpoint in W4A16 that
computes prompts in INT8; INT4 twice is one that computes them in W4A8, in another layout of its weights; two
copies are a merged checkpoint.

examples:
  flexquant advise org/name --device h100 --input-len 8192 --concurrency 1,64
  flexquant advise my-model --device rtx-4090 --tensor-parallel-size 2
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_counts, parse_counts, parse_share
from flexquant.planning.advising import advice_to_json, format_advice, try_ways
from flexquant.planning.device import builtin_devices, load_device
from flexquant.planning.planned_model import PlannedModel
from flexquant.planning.roofline import Batches


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "folder or Hugging Face id of the model, of which only config.json is read"
    add("config", metavar="MODEL", help=text)
    text = f"built-in device ({', '.join(builtin_devices())}) or device file"
    add("--device", required=True, metavar="NAME|FILE", help=text)
    text = "requests that arrive at once, one number for each load (default: 1,8,32)"
    add("--concurrency", type=parse_counts, default=(1, 8, 32), metavar="LIST", help=text)
    counts = {
        "--input-len": (1024, "tokens of a prompt"),
        "--output-len": (256, "tokens of an answer"),
        "--tensor-parallel-size": (1, "devices that share the model"),
    }
    add_counts(parser, counts)
    text = "share of the memory that vLLM may take (default: %(default)s)"
    add("--gpu-memory-utilization", type=parse_share, default=0.9, metavar="SHARE", help=text)


def run(args: argparse.Namespace) -> JsonObject:
    device = load_device(args.device)
    model = PlannedModel.read(args.config)
    batches = Batches(args.input_len, args.output_len, args.concurrency)
    size = args.tensor_parallel_size
    outcomes = try_ways(model, device, batches, size, args.gpu_memory_utilization)
    count = "" if size == 1 else f"{size} x "
    print(f"{args.config} on {count}{device.description} ({device.name})\n")
    print(format_advice(outcomes, model, device, batches))
    return {"model": args.config, "device": device.name, **advice_to_json(outcomes)}
