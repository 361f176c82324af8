# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Predict how a merged checkpoint runs on a device, without the device: pass times, crossovers, memory.

The cost model counts bytes, operations and overheads (flexquant/planning/roofline.py). It helps to choose a
device or a first policy; 'flexquant tune' measures.

examples:
  flexquant predict model-merged --device h100
  flexquant predict model-merged --device my-gpu.yaml --tensor-parallel-size 4
  flexquant predict model-merged --device cpu-2-core --measured tuned.yaml
  flexquant predict --list-devices
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.served_config import read_merged_config
from flexquant.cli._arguments import add_options, add_traffic
from flexquant.documents.results import table_lines
from flexquant.errors import UsageError
from flexquant.policy.default_policy import choose_policy, find_measured
from flexquant.policy.rules import load_policy

HELP = "predict speed and memory of a merged checkpoint on a device"


def configure(parser: argparse.ArgumentParser) -> None:
    options = {
        "folder OUT": "merged checkpoint",
        "--device NAME|FILE": "built-in device or device file",
        "--list-devices": "list the built-in devices",
        "--measured POLICY": "tuned policy whose measured times to compare with (default: OUT's stored "
        "policy, if tuned)",
        "--w4a8": "add W4A8, derived from the W4A16 variant; variants that the policy derives are there",
    }
    add_options(parser.add_argument, options, folder={"nargs": "?"})
    add_traffic(parser)


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.planning.device import builtin_devices, load_device
    from flexquant.planning.model_shape import read_model_shape
    from flexquant.planning.prediction_report import format_prediction, report_prediction

    if args.list_devices:
        devices = {name: load_device(name).description for name in builtin_devices()}
        print("\n".join(table_lines(list(devices.items()))))
        return {"devices": devices}
    if args.folder is None or args.device is None:
        raise UsageError("give a merged checkpoint and --device, or --list-devices alone")
    device = load_device(args.device)
    stored = read_merged_config(Path(args.folder))[0].policy
    policy = choose_policy(args.measured, stored)[1]
    derived = policy.derived | (load_policy("w4a8").derived if args.w4a8 else {})
    no_int8 = [name for name, one in derived.items() if one.is_one_copy and "w8a8" not in device.kernels]
    derived = {name: one for name, one in derived.items() if name not in no_int8}
    model = read_model_shape(args.folder, args.tensor_parallel_size, derived)
    measured = find_measured(args.measured, stored)
    report = report_prediction(
        model, device, args.input_len, args.output_len, args.gpu_memory_utilization, measured
    )
    count = "" if args.tensor_parallel_size == 1 else f"{args.tensor_parallel_size} x "
    print(f"{args.folder} on {count}{device.description} ({device.name})\n\n{format_prediction(report)}")
    for name in no_int8:
        print(f"note: the policy's '{name}' is left out, as the device has no INT8 kernel")
    return {"model": args.folder, **report.to_json()}
