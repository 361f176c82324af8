# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands around a merged checkpoint: convert, merge, inspect, doctor, verify, split."""

import argparse
import sys
from dataclasses import asdict

from flexquant.checkpoint.draft_heads import check_draft_heads
from flexquant.checkpoint.folder import recipe_name
from flexquant.checkpoint.measured_loss import dump_losses, loss_lines, read_losses
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import JsonObject, count_layers
from flexquant.checkpoint.weight_bytes import describe_bytes, format_bytes, format_report, report_checkpoint
from flexquant.cli._arguments import add_dtype, add_shard_size, parse_folders, pick, progress_bar
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import choose_policy

CHOSEN = {
    "config": "config",
    "tokenizer": "tokenizer and chat template",
    "generation": "generation settings",
    "processor": "processor of images",
}
"""Part of a merged model that one variant gives -> its name in help."""


def configure_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="checkpoint of another format")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    add_dtype(parser)


def convert(args: argparse.Namespace) -> JsonObject:
    """Convert an AWQ, GPTQ, AutoRound, block FP8 or Quark checkpoint to compressed-tensors.

    Quantised values do not change. AWQ (GEMM), GPTQ without desc_act, block FP8, AutoRound's exports in these
    formats and Quark's INT8 are read. 'flexquant merge' reads these formats too.

    example:
      flexquant convert model-awq --output model-w4a16 --dtype bfloat16
    """
    from flexquant.merge import convert_checkpoint

    how = pick(args, "dtype", "overwrite")
    with progress_bar("converting") as progress:
        result = convert_checkpoint(args.folder, args.output, progress=progress, **how)
    print(f"{args.output}: {result['linears']} linears, converted from {result['from']}")
    return result


def configure_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("variants", nargs="+", metavar="NAME=DIR", help="a variant's name and its checkpoint")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    text = "policy to store as the default, a built-in name or a YAML file (default: none; serving then "
    text += "uses its built-in default)"
    parser.add_argument("--policy", metavar="NAME|FILE", help=text)
    for what, part in CHOSEN.items():
        text = f"variant whose {part} the merged model gets (default: they must not differ)"
        parser.add_argument(f"--{what}-from", metavar="NAME", help=text)
    add_dtype(parser)
    for option, mode, missed in (
        ("--nested", "near", "take the nearest integer where it does not reach"),
        ("--nested-exact", "exact", "refuse variants with an integer out of reach"),
    ):
        text = "store 4 bits for each INT8 weight of W8A8, its difference to INT4's, store whole the 1/128 "
        text += f"that this misses by most, and {missed}"
        parser.add_argument(option, dest="nested", action="store_const", const=mode, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    text = "merge even though the variants' KV caches are not interchangeable (for experiments); a server "
    text += "takes policies of several variants with its option allow_incompatible_kv alone"
    parser.add_argument("--allow-incompatible-kv", action="store_true", help=text)
    add_shard_size(parser)


def merge(args: argparse.Namespace) -> JsonObject:
    """Merge quantised variants of one model into one checkpoint.

    Each variant is a checkpoint folder: of compressed-tensors, such as llmcompressor writes, of AWQ, GPTQ or
    AutoRound, of Quark in INT8, in block FP8 or in 16 bit. Tensors that are equal in all of them are stored
    once. The output appears only when it has been checked and is complete.

    example:
      flexquant merge w8a8=model-w8a8 w4a16=model-w4a16 --output model-merged --policy phase --overwrite
    """
    from flexquant.merge import merge_checkpoints

    folders = parse_folders(args.variants)
    how = pick(args, *(f"{part}_from" for part in CHOSEN), "dtype", "policy", "nested")
    how |= pick(args, "overwrite", "allow_incompatible_kv", "max_shard_size")
    comparing = progress_bar("comparing the KV caches", unit=" layers")
    with comparing as kv_progress, progress_bar("merging") as progress:
        report = merge_checkpoints(folders, args.output, progress=progress, kv_progress=kv_progress, **how)
    print(f"{args.output}: {format_report(report)}")
    return {"output": args.output, **report.to_json()}


def configure_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged, INT4 or 16-bit checkpoint")


def inspect(args: argparse.Namespace) -> JsonObject:
    """Show what a checkpoint holds: variants, bytes, bits per parameter, default policy, KV cache.

    It also shows which layers of which variant the default policy loads, and how many bytes they have.

    Only headers and configs are read, so this takes a second whatever the model's size.

    example:
      flexquant inspect model-merged
    """
    checkpoint = MergedCheckpoint.open(args.folder, published=True)
    merged, layers = checkpoint.merged, count_layers(checkpoint.config)
    for name in merged.variants:
        tensors = checkpoint.variant_tensors(name)
        check_draft_heads(checkpoint.source_config(name), tensors, f"variant '{name}'")
    recorded = checkpoint.provenance
    missed = recorded.changed_integers, recorded.added_noise
    report = report_checkpoint(merged, layers, checkpoint.tensors, *missed)
    loaded: JsonObject = {}
    try:
        policy = choose_policy(None, merged.policy)
        mixing = merged.mixable_groups, merged.nested
        routes = build_route_table(policy, merged.variants, layers, sys.maxsize, *mixing)
        loaded = routes.stored_bytes(checkpoint, routes.plans)
        said = describe_bytes(loaded)
    except FlexQuantError as e:
        said = f"unknown, since the policy cannot be served: {e}"
    losses = read_losses({name: checkpoint.folder / recipe_name(name) for name in report.variants})
    print(f"{args.folder}: {format_report(report)}\nloaded under the default policy: {said}")
    for line in loss_lines(losses):
        print(line)
    return {**report.to_json(), "loaded": loaded, "losses": dump_losses(losses)}


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged, INT4 or 16-bit checkpoint")
    text = "after --: arguments of vllm serve for the engine, not for the API server"
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help=text)


def doctor(args: argparse.Namespace) -> JsonObject:
    """Check in seconds, without loading weights, how 'vllm serve' would run a checkpoint here.

    Prints one finding a line: device and versions, policy, attention backend, CUDA graphs, the kernel of
    every linear layer and why not a better one, memory, and what would be refused. '!' marks what could be
    better, 'X' what prevents serving; the exit code is then 1.

    examples:
      flexquant doctor model-merged
      flexquant doctor model-merged -- --tensor-parallel-size 2 --max-model-len 8192
    """
    from flexquant.doctor.examining import examine

    findings = []
    for finding in examine(args.folder, args.arguments):
        print(finding.line(), flush=True)
        findings.append(finding)
    failed = any(finding.level == "problem" for finding in findings)
    return {"model": args.folder, "findings": [asdict(finding) for finding in findings], "failed": failed}


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged checkpoint")
    text = "compare bit by bit with these sources instead of the recorded hashes"
    parser.add_argument("--against", nargs="+", default=[], metavar="NAME=DIR", help=text)


def verify(args: argparse.Namespace) -> JsonObject:
    """Check every tensor of a merged checkpoint against its recorded hash, or against its sources.

    example:
      flexquant verify model-merged --against w8a8=model-w8a8 w4a16=model-w4a16
    """
    from flexquant.merge import verify_checkpoint

    with progress_bar("verifying") as progress:
        result = verify_checkpoint(args.folder, parse_folders(args.against), progress)
    for measure, count in result["tensors_compared_with"].items():
        how = ", nested weights as near as 4 bits and exceptions reach" if measure in result["nested"] else ""
        print(f"{args.folder}: {count} tensors equal to {measure}{how}")
    return result


def configure_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="merged checkpoint")
    parser.add_argument("--variant", required=True, metavar="NAME", help="variant to write")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    add_shard_size(parser)


def split(args: argparse.Namespace) -> JsonObject:
    """Write one variant of a merged checkpoint as a plain checkpoint, which any vLLM loads.

    Keys, config and recipe are those of the source, and the tensors are bit-identical; those of a nested
    variant are what it is served with.

    example:
      flexquant split model-merged --variant w4a16 --output model-w4a16
    """
    from flexquant.merge import split_checkpoint

    how = pick(args, "overwrite", "max_shard_size")
    with progress_bar("splitting") as progress:
        result = split_checkpoint(args.folder, args.variant, args.output, progress=progress, **how)
    print(f"{args.output}: {result['tensors']} tensors of '{args.variant}', {format_bytes(result['bytes'])}")
    return result
