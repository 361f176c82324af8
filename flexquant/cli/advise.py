# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Advise which way to serve a model on a device, before it is quantised: stock vLLM or FlexQuant, and how.

Of the model only config.json is read. Latencies, memory and the choice come from the cost model of 'flexquant
predict', replayed through vLLM's scheduling as in 'flexquant simulate'. One copy is a checkpoint in W4A16
that computes prompts in INT8; two copies are a merged checkpoint.

examples:
  flexquant advise my-model --device l20
  flexquant advise org/name --device h100 --input-len 8192 --concurrency 1,64
  flexquant advise my-model --device rtx-4090 --tensor-parallel-size 2
"""

from __future__ import annotations

import argparse

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_options, add_traffic

HELP = "which way to serve a model on a device, from its config.json"


def configure(parser: argparse.ArgumentParser) -> None:
    options = {
        "config MODEL": "folder or Hugging Face id of the model, of which only config.json is read",
        "--device NAME|FILE": "built-in device ('flexquant predict --list-devices') or device file",
        "--concurrency LIST": "requests that arrive at once, one number for each load (default: 1,8,32)",
    }
    add_options(parser.add_argument, options, device={"required": True}, concurrency={"default": (1, 8, 32)})
    add_traffic(parser)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.planning.advice_report import advice_to_json, format_advice
    from flexquant.planning.advising import Batches, try_ways
    from flexquant.planning.device import load_device
    from flexquant.planning.planned_model import PlannedModel

    device = load_device(args.device)
    model = PlannedModel.read(args.config)
    batches = Batches(args.input_len, args.output_len, args.concurrency)
    size = args.tensor_parallel_size
    outcomes = try_ways(model, device, batches, size, args.gpu_memory_utilization)
    count = "" if size == 1 else f"{size} x "
    print(f"{args.config} on {count}{device.description} ({device.name})\n")
    print(format_advice(outcomes, model, device, batches))
    return {"model": args.config, "device": device.name, **advice_to_json(outcomes)}
