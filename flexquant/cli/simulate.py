# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Judge policies without a GPU: replay a request trace through vLLM's scheduling with measured times.

Every forward pass takes the plan that serving would choose, and the time measured for it. The times come from
a policy that 'flexquant tune' wrote (its key 'measured'), or 'flexquant predict' predicts them for a
--device. TTFT, TPOT, ITL and throughput are defined as in 'vllm bench serve'. A trace is a JSONL file with
one request a line, in the order of arrival:

  {"arrival": 0.25, "input": 512, "output": 128}        seconds, tokens, tokens

Limits that are not given are those that 'vllm serve' (0.32) chooses by itself on the machine of the times.

examples:
  flexquant simulate --trace bursty --policy tuned.yaml --policy w8a8 --policy w4a16
  flexquant simulate --trace steady --speed 4 --policy phase --policy phase-batch --times tuned.yaml
  flexquant simulate --trace mine.jsonl --policy phase-batch-layer --times tuned.yaml --model merged/
  flexquant simulate --trace bursty --policy w8a8 --policy phase-batch --device h100 --model merged/
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.served_config import read_merged_config
from flexquant.cli._arguments import add_options, parse_counts
from flexquant.errors import UsageError
from flexquant.policy.default_policy import find_policies
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.routes import RouteTable
from flexquant.policy.rules import Policy

if TYPE_CHECKING:
    from flexquant.planning.device import Device
    from flexquant.planning.model_shape import ModelShape
    from flexquant.planning.trace import Request

HELP = "judge policies on a request trace, without a GPU"


def configure(parser: argparse.ArgumentParser) -> None:
    policies = {
        "--trace NAME|FILE": "built-in trace (bursty, steady) or JSONL file",
        "--policy NAME|FILE": "variant, built-in policy, policy file, or 'stored' for --model's policy; "
        "repeat the option to compare other policies with the first",
    }
    several = {"required": True, "action": "append"}
    add_options(parser.add_argument, policies, trace={"required": True}, policy=several)
    times = {
        "--times POLICY": "policy with measured times (default: the first --policy that has some, else "
        "--model's policy)",
        "--device NAME|FILE": "predict the times of --model on a device instead",
    }
    add_options(parser.add_mutually_exclusive_group().add_argument, times)
    limits = {
        "--model OUT": "merged checkpoint; needed for --device, and for policies that name layers",
        "--tensor-parallel-size N": "devices that share the model, for --device (default: 1)",
        "--speed X": "requests arrive X times as fast as the trace says (default: 1)",
        "--max-num-batched-tokens N": "most tokens in a pass (default: by the machine, e.g. 8192 on an H100, "
        "2048 on an L4 or a CPU)",
        "--max-num-seqs N": "most sequences in a pass (default: by the machine, e.g. 1024 on an H100, 256 on "
        "an L4, 128 on a CPU)",
        "--kv-cache-tokens N": "tokens that the KV cache holds, which vLLM logs at start (default: with "
        "--device, what fits beside the policy's variants; else no limit)",
        "--block-size N": "tokens of a KV block (default: 16 on GPUs, 128 on CPUs)",
        "--capture-sizes N,N,...|none": "tokens of the CUDA graphs, to which passes are padded (default: "
        "those of 'vllm serve' for times of a GPU that were measured with graphs, else none)",
        "--async-scheduling": "schedule a pass while the pass before runs (default: on GPUs)",
    }
    add_options(
        parser.add_argument,
        limits,
        model={"type": Path},
        speed={"type": _parse_speed, "default": 1.0},
        capture_sizes={"type": _parse_sizes},
        async_scheduling={"action": argparse.BooleanOptionalAction},
    )


def run(args: argparse.Namespace) -> JsonObject:
    from flexquant.planning.pass_cost import PassCost
    from flexquant.planning.replaying import replay
    from flexquant.planning.server import Machine, server_limits
    from flexquant.planning.simulation_report import (
        format_simulation_table,
        ratios_to_first,
        summarise_replay,
    )
    from flexquant.planning.times import check_times, route_table
    from flexquant.planning.trace import read_trace

    if args.tensor_parallel_size is not None and args.device is None:
        raise UsageError(
            "--tensor-parallel-size is for predicted times, and measured ones are those of the devices they "
            "were measured on; give --device, or leave it out"
        )
    trace = [r._replace(arrival=r.arrival / args.speed) for r in read_trace(args.trace)]
    model = None if args.model is None else read_merged_config(args.model)
    policies, times, source, predicted = _find_policies_and_times(args, model)
    machine = Machine.of_times(times)
    if predicted is not None:
        machine = Machine.of_device(predicted[1], args.tensor_parallel_size or 1)
    most = args.max_num_batched_tokens, args.max_num_seqs, args.kv_cache_tokens
    limits = server_limits(machine, *most, args.block_size, args.capture_sizes, args.async_scheduling)
    for name, policy in policies.items():
        check_times(name, policy, times)
    cost = PassCost(times)
    tables = {name: route_table(policy, times, limits, model) for name, policy in policies.items()}
    kv_cache = dict.fromkeys(tables, args.kv_cache_tokens)
    if predicted is not None and args.kv_cache_tokens is None:
        kv_cache = {name: _kv_cache_tokens(*predicted, table, trace) for name, table in tables.items()}
    results = {
        name: summarise_replay(replay(trace, table, cost, replace(limits, kv_cache_tokens=kv_cache[name])))
        for name, table in tables.items()
    }

    tokens = {"input": sum(r.input for r in trace), "output": sum(r.output for r in trace)}
    seconds = trace[-1].arrival - trace[0].arrival
    print(
        f"{args.trace}: {len(trace)} requests in {seconds:.4g} s, {tokens['input']} input and "
        f"{tokens['output']} output tokens; times of {source}"
    )
    print(f"limits: {limits}")
    if predicted is not None and args.kv_cache_tokens is None:
        print("KV cache: " + ", ".join(f"{name} {size} tokens" for name, size in kv_cache.items()))
    print(format_simulation_table(results))
    return {
        "trace": {"name": args.trace, "requests": len(trace), "seconds": seconds, **tokens},
        "speed": args.speed,
        "limits": asdict(limits),
        "kv_cache_tokens": kv_cache,
        "times": {"source": source, "origin": dict(times.origin)},
        "results": results,
        "relative_to_first": ratios_to_first(results),
    }


def _find_policies_and_times(
    args: argparse.Namespace, model: tuple[MergedConfig, int] | None
) -> tuple[dict[str, Policy], PassTimes, str, tuple[ModelShape, Device] | None]:
    """Return the policies, the times, their source and, if predicted, the model and the device."""
    from flexquant.planning.times import find_times

    if model is None:
        if args.device is not None:
            raise UsageError(
                "--device predicts the times of a model; give its merged checkpoint with --model"
            )
        times, source = find_times(args.policy, args.times)
        return find_policies(args.policy, times.variants), times, source, None
    variants, stored = list(model[0].variants), model[0].policy
    policies = find_policies(args.policy, variants, args.model, stored)
    if args.device is None:
        return policies, *find_times(args.policy, args.times, stored), None

    from flexquant.planning.device import load_device
    from flexquant.planning.model_shape import read_model_shape
    from flexquant.planning.predicting import CONTEXT, roofline_pass_times

    derived = {name: one for policy in policies.values() for name, one in policy.derived.items()}
    device = load_device(args.device)
    shape = read_model_shape(args.model, args.tensor_parallel_size or 1, derived)
    return policies, roofline_pass_times(shape, device, CONTEXT), args.device, (shape, device)


def _kv_cache_tokens(model: ModelShape, device: Device, table: RouteTable, trace: list[Request]) -> int:
    """Return the tokens of KV cache that fit beside the variants of the table's plans, with all layers."""
    from flexquant.planning.predicting import UTILIZATION, kv_cache_tokens

    variants = list(dict.fromkeys(variant for plan in table.plans for variant in plan.variants))
    longest = max(request.input + request.output for request in trace)
    return kv_cache_tokens(model, device, longest, UTILIZATION, variants)


def _parse_sizes(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        return tuple(sorted(set(parse_counts(text))))
    except argparse.ArgumentTypeError as e:
        raise argparse.ArgumentTypeError(f"'{text}' is neither 'none' nor sizes such as 8,16: {e}") from e


def _parse_speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return speed
