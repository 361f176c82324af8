# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure the variants on this machine, and write the policy that follows from it.

An engine is started for each variant, as serving would, and the variants' forward passes are timed in turn,
by phase and size. The sizes at which one variant overtakes another become rules. The policy holds the times,
and a plot is written beside it. An interrupted run resumes if it is started again with the same arguments.
Run nothing else on the machine meanwhile.

With --from-metrics nothing is measured here: the times of an earlier run are scaled to the times of a live
server, and the best policy for its traffic is written, with the time that it would save. It is not applied.

examples:
  flexquant tune model-merged --output tuned.yaml
  flexquant tune model-merged --output tuned.yaml --variants w8a8,w4a16,w4a8 --objective latency
  flexquant tune model-merged --output tuned.yaml --slo ttft=300ms,tpot=30ms
  flexquant tune model-merged --output tuned.yaml --max-quality-loss 0.05 --text text.txt --reference model
  flexquant tune model-merged --output tuned.yaml --memory 20GiB --sensitivity sensitivity.json
  flexquant tune model-merged --output proposed.yaml --from-metrics http://127.0.0.1:8000 --times tuned.yaml
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import DEFAULTS, add_effort, add_options, parse_number, progress_bar, tell
from flexquant.errors import UsageError
from flexquant.tuning.objectives import OBJECTIVES

if TYPE_CHECKING:
    from flexquant.checkpoint.merged_config import MergedConfig
    from flexquant.layers.fitting import Fit
    from flexquant.layers.sensitivity import Study
    from flexquant.policy.rules import Policy
    from flexquant.tuning.objectives import Goal
    from flexquant.tuning.policy_file import TuningFiles, TuningResult
    from flexquant.tuning.rounds import Grid

HELP = "measure the variants on this machine and write the policy that follows"


def configure(parser: argparse.ArgumentParser) -> None:
    files = {
        "folder OUT": "merged checkpoint",
        "--output FILE": "policy to write, ending in .yaml",
        "--overwrite": "replace an existing output, and the samples of an interrupted run with other "
        "arguments",
    }
    path = {"type": Path}
    add_options(parser.add_argument, files, folder=path, output={**path, "required": True})
    goals = {
        "--objective": "latency: the fastest variant at every size; balanced: the same, without variants "
        "that gain less than 5 %% at every size; throughput: the variants that decode most tokens a second "
        "at the largest batch that fits into memory beside them (default: %(default)s)",
        "--slo BOUNDS": "bounds such as ttft=300ms,tpot=30ms: the most precise variants whose passes keep "
        "them",
    }
    objective = {"action": "store", "choices": OBJECTIVES, "default": "balanced"}
    add_options(parser.add_mutually_exclusive_group().add_argument, goals, objective=objective)
    choice = {
        "--variants NAMES": "comma-separated variants to choose among, or policies of one variant such as "
        "w4a8 (default: all variants of the checkpoint)",
        "--max-quality-loss X": "largest KL divergence to 16 bit, in nats a token; if a variant loses more, "
        "with --text decode takes the fastest plan within the limit, which can mix layers of variants, and "
        "with --quality the variant is left out",
        "--text FILE": "text or .jsonl file on which to measure the loss, with the defaults of 'flexquant "
        "search'",
        "--reference MODEL": "folder or Hugging Face id of the 16-bit model, for --text (default: the most "
        "precise variant)",
        "--quality FILE": "quality.json of 'flexquant eval', instead of --text",
        "--memory SIZE": "memory of each GPU, or of the CPU, for weights: as many layers as fit have W8A8 of "
        "their own, and the others compute INT8 weights from INT4",
        "--kv-tokens N": "the same, but for the memory that a KV cache of so many tokens leaves for weights",
        "--sensitivity FILE": "sensitivity.json of 'flexquant sensitivity', by which --memory chooses layers "
        "(default: from the first)",
        "--request-tokens N": "tokens of a request, prompt and answer, for --objective throughput (default: "
        "%(default)s)",
        "--from-metrics URL": "propose a policy for the traffic of this vllm serve, from its /metrics; "
        "options that control measuring are then ignored",
        "--seconds S": "seconds to watch the server of --from-metrics; 0: all passes since its start "
        "(default: %(default)g)",
        "--times FILE": "policy of 'flexquant tune' with the times to scale (default: the checkpoint's "
        "policy)",
        "--quick": "few sizes and rounds, for a first look",
    }
    add_options(
        parser.add_argument, choice, text=path, quality=path, sensitivity=path, seconds={"type": parse_number}
    )
    parser.set_defaults(request_tokens=2048, seconds=60.0)
    add_effort(parser.add_argument, "every size")
    engines = {
        "--max-batch N": "sequences of the largest batch",
        "--max-tokens N": "tokens of the longest prompt",
        "--tensor-parallel-size N": "GPUs",
        "--enforce-eager": "measure without compilation and CUDA graphs; choose as you will serve (default: "
        "on CPUs, where compiling takes minutes)",
    }
    eager = {"action": argparse.BooleanOptionalAction}
    add_options(parser.add_argument, engines, tensor_parallel_size={"default": 1}, enforce_eager=eager)


def _is_for_memory(args: argparse.Namespace) -> bool:
    return args.memory is not None or args.kv_tokens is not None


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together."""
    measured_by = (args.text is not None) + (args.quality is not None)
    if measured_by != (args.max_quality_loss is not None):
        raise UsageError("--max-quality-loss needs --text or --quality, one of them, and they need it")
    if args.text is not None and args.from_metrics is not None:
        raise UsageError("--text measures on this machine; leave --from-metrics out, or give --quality")
    if args.memory is not None and args.kv_tokens is not None:
        raise UsageError("--memory and --kv-tokens are two ways to say one thing; leave one out")
    if _is_for_memory(args) and (measured_by or args.from_metrics is not None):
        raise UsageError("--memory goes with neither --max-quality-loss nor --from-metrics; leave one out")
    if args.sensitivity is not None and not _is_for_memory(args):
        raise UsageError("--sensitivity says which layers --memory chooses; give --memory too")
    if args.reference is not None and args.text is None:
        raise UsageError("--reference is what --text is measured against; give --text too")


def run(args: argparse.Namespace) -> JsonObject:
    _check(args)

    from flexquant.checkpoint.served_config import read_merged_config
    from flexquant.measuring.workers import import_ahead
    from flexquant.tuning.candidates import find_variants, leave_out_lossy
    from flexquant.tuning.objectives import Goal, Slo
    from flexquant.tuning.policy_file import TuningFiles

    slo = None if args.slo is None else Slo.parse(args.slo)
    goal = Goal(args.objective, slo, args.request_tokens)
    output = TuningFiles(args.output, args.overwrite)
    merged, num_layers = read_merged_config(args.folder)
    variants = find_variants(merged, _names(args, merged))
    remarks = []
    if args.quality is not None:
        kept, losses = leave_out_lossy(variants, args.quality, args.max_quality_loss)
        remarks = [
            f"{name} is left out: its quality loss is {losses[name]:.3g}, above {args.max_quality_loss:g}."
            for name in variants
            if name not in kept
        ]
        variants = kept

    if args.from_metrics is not None:
        return _propose(args, goal, output, variants)

    study = None if args.text is None else _study(args, variants)
    import_ahead()
    fit = None
    if _is_for_memory(args):
        fit = _fit(args, merged, num_layers, variants)
        variants = fit.candidates
        tell(fit.remark)
    from flexquant.tuning.tuning import Tuning

    tuning = Tuning(
        args.folder,
        output,
        variants,
        goal,
        _grid(args),
        tensor_parallel_size=args.tensor_parallel_size,
        enforce_eager=_on_cpu() if args.enforce_eager is None else args.enforce_eager,
        remarks=remarks,
    )
    tuning.measure(tell, progress_bar)
    tuned = tuning.decide(None if fit is None else fit.together)
    if fit is not None:
        tuned = fit.report(tuned)
    if study is not None:
        from flexquant.layers.limiting import limit_loss

        tuned = limit_loss(
            tuned, study, args.max_quality_loss, output.sensitivity, overwrite=args.overwrite, progress=tell
        )
    return _tell(tuned, tuning.write(tuned))


def _names(args: argparse.Namespace, merged: MergedConfig) -> tuple[str, ...] | None:
    """Return the names of the variants to choose among; None: the default."""
    from flexquant.tuning.candidates import FROM_INT4, SOURCE

    names: tuple[str, ...] | None = args.variants
    if not _is_for_memory(args):
        return names
    if SOURCE not in merged.variants:
        raise UsageError(
            f"--memory and --kv-tokens need a variant {SOURCE}, and the checkpoint has "
            f"{', '.join(merged.variants)}; merge one with INT4 weights under that name"
        )
    return (*(names or merged.variants), SOURCE, FROM_INT4)


def _fit(args: argparse.Namespace, merged: MergedConfig, num_layers: int, variants: dict[str, Policy]) -> Fit:
    """Return what fits into --memory, or beside --kv-tokens; raise FlexQuantError if nothing does."""
    from flexquant.doctor.loaded_bytes import count_bytes
    from flexquant.layers.fitting import Fit
    from flexquant.layers.plan_losses import PlanLosses
    from flexquant.layers.sensitivity import policy_that_loads
    from flexquant.tuning.candidates import FROM_INT4, SOURCE, eight_bit

    losses, high = None, eight_bit(variants, merged)
    if args.sensitivity is not None and high is not None:
        sizes = {file.name: file.stat().st_size for file in args.folder.glob("*.safetensors")}
        losses = PlanLosses(args.sensitivity, high, (FROM_INT4, SOURCE), num_layers, sizes)
    loaded = count_bytes(args.folder, policy_that_loads(variants), args.tensor_parallel_size)
    memory = args.memory if args.kv_tokens is None else loaded.most_beside(args.kv_tokens)
    return Fit.of(variants, memory, loaded, num_layers, losses, high=high, mixable=merged.mixable_groups)


def _study(args: argparse.Namespace, variants: dict[str, Policy]) -> Study:
    """Return the study that measures losses; raise FlexQuantError for inputs that cannot be measured."""
    from flexquant.evaluation.inputs import Subject, read_rows
    from flexquant.layers.sensitivity import Study

    subject = Subject.open(args.folder)
    study = Study.of(subject, variants, args.text, args.reference, DEFAULTS)
    read_rows(args.text, subject.tokenizer, DEFAULTS)
    return study


def _propose(
    args: argparse.Namespace, goal: Goal, output: TuningFiles, variants: dict[str, Policy]
) -> JsonObject:
    from flexquant.checkpoint.served_config import read_merged_config
    from flexquant.policy.default_policy import find_measured
    from flexquant.tuning.policy_file import write_files
    from flexquant.tuning.retuning import Retuning
    from flexquant.tuning.traffic import watch

    if goal.objective == "throughput":
        raise UsageError("--objective throughput needs the device; leave --from-metrics out")
    merged, num_layers = read_merged_config(args.folder)
    found = find_measured(args.times, merged.policy)
    if found is None:
        raise UsageError(f"{args.folder} stores no measured times; give a policy with some as --times")
    retuning = Retuning(watch(args.from_metrics, args.seconds), found[0], variants, num_layers)
    tuned = retuning.propose(goal, args.from_metrics)
    return _tell(tuned, write_files(output, tuned, f"{args.folder.name}: time of a pass, scaled"))


def _tell(tuned: TuningResult, files: list[Path]) -> JsonObject:
    for line in tuned.notes:
        print(line)
    for file in files:
        print(f"wrote {file}")
    if len(files) == 1:
        print("no plot: matplotlib is missing; pip install matplotlib", file=sys.stderr)
    return tuned.document


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _grid(args: argparse.Namespace) -> Grid:
    from flexquant.tuning.rounds import CPU, GPU, QUICK_CPU, QUICK_GPU

    full, quick = (CPU, QUICK_CPU) if _on_cpu() else (GPU, QUICK_GPU)
    grid = quick if args.quick else full
    grid = grid.up_to(args.max_batch, args.max_tokens)
    return replace(grid, effort=grid.effort.changed(args.rounds, args.max_rounds, args.width))
