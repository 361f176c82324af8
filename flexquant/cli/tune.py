# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands that find out how to serve: tune times variants, fit too, for a memory; advise predicts."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import flexquant.cli._arguments as options
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import write_text
from flexquant.documents.yaml_document import builtin_names
from flexquant.errors import UsageError
from flexquant.evaluation.inputs import read_rows
from flexquant.evaluation.workers import import_ahead
from flexquant.planning.advising import advice_to_json, format_advice, try_ways
from flexquant.planning.device import PACKAGE, load_device
from flexquant.planning.planned_model import PlannedModel
from flexquant.planning.roofline import Batches
from flexquant.policy.rules import Policy
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.measure import Measurement
from flexquant.tuning.objectives import OBJECTIVES, Goal, decide, parse_slo
from flexquant.tuning.policy_file import TuningFiles, TuningResult, draw_times, policy_text, tuned_policy
from flexquant.tuning.samples import CPU, GPU, QUICK_CPU, QUICK_GPU


def configure_tune(parser: argparse.ArgumentParser) -> None:
    _add_goal(parser)
    add = parser.add_argument
    text = "largest KL divergence to 16 bit, in nats a token, measured on --text; if a variant loses more, "
    text += "decode takes the fastest plan within the limit, which can mix layers of variants"
    add("--max-quality-loss", type=options.parse_number, metavar="X", help=text)
    text = "text or .jsonl file on which to measure the loss, with the defaults of 'flexquant search'"
    add("--text", type=Path, metavar="FILE", help=text)
    text = "folder or Hugging Face id of the 16-bit model, for --text (default: the most precise variant)"
    add("--reference", metavar="MODEL", help=text)
    _add_measuring(parser)


def configure_fit(parser: argparse.ArgumentParser) -> None:
    _add_goal(parser)
    memory = parser.add_mutually_exclusive_group(required=True)
    text = "memory of each GPU, or of the CPU, for weights: as many layers as fit store W8A8, "
    text += "and the others compute INT8 weights from INT4"
    memory.add_argument("--memory", type=options.parse_size, metavar="SIZE", help=text)
    text = "the same, but for the memory that a KV cache of so many tokens leaves for weights"
    memory.add_argument("--kv-tokens", type=options.parse_count, metavar="N", help=text)
    text = "sensitivity.json of 'flexquant sensitivity', by which layers are chosen (default: from the first)"
    parser.add_argument("--sensitivity", type=Path, metavar="FILE", help=text)
    _add_measuring(parser)


def configure_advise(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "folder or Hugging Face id of the model, of which only config.json is read"
    add("config", metavar="MODEL", help=text)
    text = f"built-in device ({', '.join(builtin_names(PACKAGE))}) or device file"
    add("--device", required=True, metavar="NAME|FILE", help=text)
    text = "requests that arrive at once, one number for each load (default: 1,8,32)"
    add("--concurrency", type=options.parse_counts, default=(1, 8, 32), metavar="LIST", help=text)
    counts = {
        "--input-len": (1024, "tokens of a prompt"),
        "--output-len": (256, "tokens of an answer"),
        "--tensor-parallel-size": (1, "devices that share the model"),
    }
    options.add_counts(parser, counts)
    text = "share of the memory that vLLM may take (default: %(default)s)"
    add("--gpu-memory-utilization", type=options.parse_share, default=0.9, metavar="SHARE", help=text)


def _add_goal(parser: argparse.ArgumentParser) -> None:
    """Add the options of the checkpoint, of the policy to write, and of what it is to be good at."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="merged, INT4 or 16-bit checkpoint")
    add("--output", type=Path, required=True, metavar="FILE", help="policy to write, ending in .yaml")
    text = "replace an existing output, and the samples of an interrupted run with other arguments"
    add("--overwrite", action="store_true", help=text)
    goal = parser.add_mutually_exclusive_group()
    text = "latency: the fastest variant at every size; balanced: the same, without variants that gain "
    text += "less than 5 %% at every size; throughput: the variants that decode most tokens a second at the "
    text += "largest batch that fits into memory beside them (default: %(default)s)"
    goal.add_argument("--objective", choices=OBJECTIVES, default="balanced", help=text)
    text = "bounds such as ttft=300ms,tpot=30ms: the most precise variants whose passes keep them"
    goal.add_argument("--slo", metavar="BOUNDS", help=text)
    tokens = "tokens of a request, prompt and answer, for --objective throughput"
    options.add_counts(parser, {"--request-tokens": (2048, tokens)})
    options.add_variants(add)


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which sizes are measured, how often, and with which engines."""
    add = parser.add_argument
    add("--quick", action="store_true", help="few sizes and rounds, for a first look")
    options.add_effort(add, "every size")
    add("--max-batch", type=options.parse_count, metavar="N", help="sequences of the largest batch")
    add("--max-tokens", type=options.parse_count, metavar="N", help="tokens of the longest prompt")
    add("--tensor-parallel-size", type=options.parse_count, default=1, metavar="N", help="GPUs")
    text = "measure without compilation and CUDA graphs; choose as you will serve (default: on CPUs, where "
    text += "compiling takes minutes)"
    add("--enforce-eager", action=argparse.BooleanOptionalAction, help=text)


def tune(args: argparse.Namespace) -> JsonObject:
    """Measure the variants on this machine, and write the policy that follows from it.

    An engine is started for each variant, as serving would, and the variants' forward passes are timed in
    turn, by phase and size. The sizes at which one variant overtakes another become rules. The policy holds
    the times, and a plot is written beside it. An interrupted run resumes if it is started again with the
    same arguments. Run nothing else on the machine meanwhile.

    examples:
      flexquant tune model-merged --output tuned.yaml --variants w8a8,w4a16,w4a8 --objective latency
      flexquant tune model-merged --output tuned.yaml --slo ttft=300ms,tpot=30ms
      flexquant tune model-merged --output tuned.yaml --max-quality-loss 0.05 --text text.txt
    """
    if (args.text is None) != (args.max_quality_loss is None):
        raise UsageError("--max-quality-loss and --text need each other; give both or neither")
    if args.reference is not None and args.text is None:
        raise UsageError("--reference is what --text is measured against; give --text too")

    goal, output = _read_goal(args)
    variants = find_variants(read_merged_config(args.folder)[0], args.variants)
    study = None if args.text is None else options.study_of(args, options.STUDY_DEFAULTS)
    if study is not None:
        read_rows(args.text, study.subject.tokenizer, options.STUDY_DEFAULTS)  # a short text is refused now

    measured = _measure(args, variants, output)
    decision = decide(measured.samples, measured.names, goal, measured.requests)
    tuned = tuned_policy(measured, decision, goal)
    if study is not None:
        from flexquant.layers.searching import limit_loss

        how: JsonObject = {**options.pick(args, "overwrite"), "progress": options.tell}
        tuned = limit_loss(tuned, study, args.max_quality_loss, output.sensitivity, **how)
    return _write(measured, tuned, output)


def fit(args: argparse.Namespace) -> JsonObject:
    """Fit a merged checkpoint with INT4 weights into a memory: measure, and write the policy that follows.

    All layers have INT4 weights. As many layers as fit have W8A8 of their own, and the others compute INT8
    weights from INT4 in each pass. That plan is measured like a variant, as by 'flexquant tune', and the
    fastest of what fits together becomes the policy. It holds a table of the choices.

    examples:
      flexquant fit model-merged --output fitting.yaml --memory 20GiB --sensitivity sensitivity.json
      flexquant fit model-merged --output fitting.yaml --kv-tokens 60000
    """
    goal, output = _read_goal(args)
    import_ahead()
    from flexquant.layers.memory_fit import fit_checkpoint

    limit, devices = options.pick(args, "memory", "kv_tokens"), args.tensor_parallel_size
    found = fit_checkpoint(args.folder, args.variants, args.sensitivity, devices=devices, **limit)
    options.tell(found.remark)
    measured = _measure(args, found.candidates, output)
    decision = decide(measured.samples, measured.names, goal, measured.requests, found.together)
    return _write(measured, found.report(tuned_policy(measured, decision, goal)), output)


def advise(args: argparse.Namespace) -> JsonObject:
    """Advise how to serve a model on a device, before it is quantised: by stock vLLM or FlexQuant, and how.

    Of the model only config.json is read. Latencies, memory and the choice come from a cost model that counts
    bytes, operations and overheads of the passes that requests take. One copy is a checkpoint in W4A16 that
    computes prompts in INT8; INT4 twice is one that computes them in W4A8, in another layout of weights; two
    copies are a merged checkpoint.

    examples:
      flexquant advise org/name --device h100 --input-len 8192 --concurrency 1,64
      flexquant advise my-model --device rtx-4090 --tensor-parallel-size 2
    """
    device = load_device(args.device)
    model = PlannedModel.read(args.config)
    batches = Batches(args.input_len, args.output_len, tuple(dict.fromkeys(args.concurrency)))
    size = args.tensor_parallel_size
    outcomes = try_ways(model, device, batches, size, args.gpu_memory_utilization)
    count = "" if size == 1 else f"{size} x "
    print(f"{args.config} on {count}{device.description} ({device.name})\n")
    print(format_advice(outcomes, model, device, batches))
    return {"model": args.config, "device": device.name, **advice_to_json(outcomes)}


def _read_goal(args: argparse.Namespace) -> tuple[Goal, TuningFiles]:
    """Read the options of :func:`_add_goal`; raise UsageError for bad bounds and an output that exists."""
    slo = {} if args.slo is None else parse_slo(args.slo)
    return Goal(args.objective, slo, args.request_tokens), TuningFiles(args.output, args.overwrite)


def _measure(args: argparse.Namespace, variants: Mapping[str, Policy], output: TuningFiles) -> Measurement:
    """Measure the variants as the options of :func:`_add_measuring` say."""
    import_ahead()
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    full, quick = (CPU, QUICK_CPU) if on_cpu else (GPU, QUICK_GPU)
    grid = (quick if args.quick else full).up_to(args.max_batch, args.max_tokens)
    measurement = Measurement(
        args.folder,
        variants,
        replace(grid, effort=grid.effort.changed(args.rounds, args.max_rounds, args.width)),
        output.samples,
        **options.pick(args, "overwrite", "tensor_parallel_size"),
        request_tokens=args.request_tokens if args.objective == "throughput" else None,
        enforce_eager=on_cpu if args.enforce_eager is None else args.enforce_eager,
    )
    measurement.measure(options.tell, options.progress_bar)
    return measurement


def _write(measured: Measurement, tuned: TuningResult, output: TuningFiles) -> JsonObject:
    """Write the files, then delete the samples: if writing fails, the command can be run again."""
    write_text(output.policy, policy_text(tuned))
    measured.discard_samples()
    remark = measured.head_remark(tuned.document)
    for line in (*tuned.notes, *filter(None, [remark]), f"wrote {output.policy}"):
        print(line)
    options.save_plot(output.plot, partial(draw_times, tuned, f"{measured.run['model']}: time of a pass"))
    return tuned.document
