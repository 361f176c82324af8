# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build a merged checkpoint from a 16-bit model: quantise, compare the KV caches, merge and verify.

Each step's result appears only when it is complete: a build that was killed and restarted writes the same
bytes. A finished variant is not quantised again; a finished checkpoint is only verified, and measured as
served.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.folder import COPIED, find_files
from flexquant.checkpoint.measured_loss import PROMPT_TOKENS, LossByKind
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import SHARED_PREFIX
from flexquant.checkpoint.model_config import count_layers
from flexquant.checkpoint.module_names import EXPERTS
from flexquant.checkpoint.output import prepare_output, remove_leftovers
from flexquant.checkpoint.weight_bytes import CheckpointReport, report_checkpoint
from flexquant.checkpoint.writer import DEFAULT_SHARD_SIZE, plan_shards
from flexquant.documents.results import hash_file
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.formats import open_source
from flexquant.merge.merge_plan import plan_merge
from flexquant.merge.merging import policy_to_store
from flexquant.merge.nesting import find_pair
from flexquant.merge.sidecar_plan import plan_sidecars
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import Policy, choose_policy
from flexquant.quantization.progress import Stage, no_stage, quiet_libraries
from flexquant.quantization.quantizing import quantize_variants
from flexquant.quantization.recipe import UNROTATED, Recipe
from flexquant.quantization.report import QuantizedVariant
from flexquant.quantization.resolve import schemes_of
from flexquant.quantization.source_model import find_folder, read_source
from flexquant.quantization.vocabulary import ROTATES

STAGES_AFTER_QUANTISING = 3
"""Stages of :func:`build_checkpoint` after quantising: merging, verifying, measuring."""
ADVICE = "choose another folder, or replace it with --overwrite"


@dataclass(frozen=True)
class BuildResult:
    variants: list[QuantizedVariant]
    report: CheckpointReport
    """Contents of the merged checkpoint."""
    tensors_compared: dict[str, int]
    """Variant -> number of tensors found equal to its own, bit for bit."""
    nested_losses: dict[str, LossByKind]
    """Nested variant -> what it lost as it is stored."""
    answer_losses: dict[str, LossByKind]
    """Policy, and its decode variant alone -> what was lost on answers to prompts of PROMPT_TOKENS tokens."""


def build_checkpoint(
    model: str | Path,
    output: str | Path,
    recipe: Recipe,
    *,
    variants_folder: str | Path | None = None,
    policy: str | None = None,
    nested: bool = False,
    overwrite: bool = False,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Callable[[str], None] = lambda message: None,
    stage: Stage = no_stage,
    verbose: bool = False,
    **quantizing: Any,
) -> BuildResult:
    """Quantise ``model`` by ``recipe``, merge the variants into ``output``, and verify it against them.

    The variants stay in ``variants_folder`` (default: ``output`` with ``-variants`` appended). ``policy``, a
    built-in name or a file, replaces the recipe's. ``nested`` rounds W8A8 to what INT4 reaches, and stores it
    as ``near`` does in :func:`merge_checkpoints`. ``overwrite`` replaces folders that other inputs made.
    ``progress``, ``verbose`` and ``quantizing`` are arguments of
    :func:`~flexquant.quantization.quantizing.quantize_variants`; STAGES_AFTER_QUANTISING stages follow its.

    Raises FlexQuantError as the steps do, before the first for a policy or output that is not possible.
    Without ``overwrite`` an existing ``output`` has to be a merged checkpoint of these variants.
    """
    output = Path(output)
    folder = Path(variants_folder) if variants_folder else Path(f"{output}-variants")
    policy = policy or recipe.policy
    _check_policy(policy, recipe)
    if nested:
        recipe = recipe_to_nest(recipe)
    finished = output.exists() and not overwrite
    if finished:
        _check_finished(output, list(recipe.variants), policy, nested, max_shard_size)
        remove_leftovers(output)
    else:
        prepare_output(output, [folder, *filter(Path.exists, [Path(model)])], overwrite=overwrite)
    shown: dict[str, Any] = {"progress": progress, "stage": stage, "verbose": verbose}
    check = partial(_check_mergeable, list(recipe.variants), policy)
    quantizing = {"resume": True, "overwrite": overwrite, "check": check, **shown, **quantizing}
    variants = quantize_variants(model, folder, recipe, **quantizing)
    sources = [(variant.name, variant.folder) for variant in variants]
    if finished:
        with stage(f"{output} is merged already"):
            _check_files(output, sources)
    else:
        options: dict[str, Any] = {"policy": policy, "overwrite": overwrite, "max_shard_size": max_shard_size}
        options["nested"] = "near" if nested else None
        with stage(f"comparing the KV caches, and merging into {output}") as show:
            merge_checkpoints(sources, output, progress=show, kv_progress=show, **options)
    with stage(f"comparing {output} with the variants, bit for bit") as show:
        compared = verify_checkpoint(output, sources, show)["tensors_compared_with"]
    merged = MergedCheckpoint.open(output)
    with stage("measuring what is lost as it is served"):
        nested_losses, answers = _measure_served(model, merged, dict(sources), progress, verbose)
    missed = merged.provenance.changed_integers, merged.provenance.added_noise
    report = report_checkpoint(merged.merged, count_layers(merged.config), merged.tensors, *missed)
    return BuildResult(variants, report, compared, nested_losses, answers)


def _measure_served(
    model: str | Path,
    merged: MergedCheckpoint,
    variants: Mapping[str, str],
    progress: Callable[[str], None],
    verbose: bool,
) -> tuple[dict[str, LossByKind], dict[str, LossByKind]]:
    """Return by kind of text what nested variants lose, and what is lost on answers, against ``model``.

    Answers are those under the policy of ``merged``, and of its decode variant alone, where both are whole.
    """
    nested, answers = dict[str, LossByKind](), dict[str, LossByKind]()
    policy = choose_policy(stored=merged.merged.policy)
    prefill, decode = _phases(policy, merged) or ("", "")
    if not prefill and not merged.merged.nested:
        return nested, answers
    with nullcontext() if verbose else quiet_libraries(progress):
        from flexquant.quantization.loss import measure_answers, measure_loss, read_prompts, read_reference
        from flexquant.quantization.oneshot import explained_memory, load_quantized, load_whole

        folder, prompts = find_folder(model, progress), None
        whole = f"{merged.folder} is whole, and can be served"
        explained = explained_memory("measuring what is lost as it is served", whole)
        parent, prefix = merged.folder.parent, f".{merged.folder.name}.flexquant-tmp-"
        with explained, TemporaryDirectory(prefix=prefix, dir=parent) as work:
            reference = read_reference(load_whole(read_source(folder)), load_tokenizer(folder))
            folders = {prefill: Path(variants[prefill])} if prefill else {}
            for name in merged.merged.nested:
                folders[name] = Path(work) / name
                split_checkpoint(merged.folder, name, folders[name])
            for name, stored in folders.items():
                found = load_quantized(stored)
                if name in merged.merged.nested:
                    nested[name] = measure_loss(found, reference)
                if name == prefill:
                    prompts = read_prompts(found, reference)
                del found
                gc.collect()  # compressed-tensors' modules refer to themselves
            if prompts is not None:
                found = load_quantized(Path(variants[decode]))
                answers[policy.name] = measure_answers(found, prompts, reference)
                own = read_prompts(found, reference)
                assert own is not None, "one architecture has one kind of cache"
                answers[f"{decode} alone"] = measure_answers(found, own, reference)
    return nested, answers


def _phases(policy: Policy, merged: MergedCheckpoint) -> tuple[str, str] | None:
    """Return a prompt's and an answer's variant; None unless both are whole, for experts, an INT8 head."""
    variants = merged.merged.variants
    as_stored = {*policy.variants} <= {*variants} and policy.head == "stored"
    if not as_stored or any(map(EXPERTS.match, merged.tensors)):
        return None
    table = build_route_table(policy, list(variants), count_layers(merged.config), PROMPT_TOKENS)
    plans = table.lookup("prefill", PROMPT_TOKENS), table.lookup("decode", 1)
    (prefill, *mixed), (decode, *also_mixed) = (plan.variants for plan in plans)
    if mixed or also_mixed or prefill == decode or decode in merged.merged.nested:
        return None
    return prefill, decode


def _check_policy(policy: str | None, recipe: Recipe) -> None:
    """Raise FlexQuantError unless the recipe makes the variants that the policy uses."""
    if policy is None and len(recipe.variants) == 1:
        return
    chosen = choose_policy(policy)
    for variant in chosen.variants:
        if variant not in recipe.variants:
            problem = f"the policy '{chosen.name}' uses the variant '{variant}'"
            made = f"but the recipe '{recipe.name}' makes {', '.join(recipe.variants)}"
            raise FlexQuantError(f"{problem}, {made}; choose another with --policy")


def recipe_to_nest(recipe: Recipe) -> Recipe:
    """Return a recipe that rounds W8A8's weights to what INT4 can nest, where it rounds by GPTQ.

    Raises FlexQuantError for a recipe whose variants merging would not nest, whatever the model.
    """
    if rotated := [name for name, variant in recipe.variants.items() if ROTATES in variant.modifiers]:
        raise FlexQuantError(
            f"the recipe '{recipe.name}' rotates inputs of '{rotated[0]}', which cannot be nested; take the "
            f"recipe '{UNROTATED}', remove {ROTATES} from yours, or build without --nested"
        )
    return recipe.nested(*find_pair({name: schemes_of(v) for name, v in recipe.variants.items()}))


def _check_mergeable(variants: Sequence[str], policy: str | None, folder: Path) -> None:
    """Raise FlexQuantError for what merging would refuse, however the model in ``folder`` is quantised."""
    from flexquant.merge.kv.compatibility import build_skeleton
    from flexquant.merge.kv.variant_weights import VariantWeights

    plan = plan_merge([open_source(name, folder) for name in variants][:1])
    chosen = choose_policy(policy, policy_to_store(policy, variants))
    build_route_table(chosen, variants, plan.num_layers, sys.maxsize)
    if len(variants) > 1:
        VariantWeights(plan.sources[0], build_skeleton(plan.sources[0]))


def _check_finished(
    output: Path, variants: Sequence[str], policy: str | None, nested: bool, max_shard_size: int
) -> None:
    """Raise FlexQuantError unless ``output`` is such a merged checkpoint of these variants."""
    if not (output / "config.json").is_file():
        raise FlexQuantError(f"{output} exists and is not a merged checkpoint; choose another folder")
    try:
        checkpoint = MergedCheckpoint.open(output)
    except FlexQuantError as e:
        raise FlexQuantError(f"{output} exists and cannot be gone on with ({e}); {ADVICE}") from e
    merged = checkpoint.merged
    prefixes = (SHARED_PREFIX, *(variant.prefix for variant in merged.variants.values()))
    groups = [{k: ref for k, ref in checkpoint.tensors.items() if k.startswith(p)} for p in prefixes]
    files = {k: shard.file for shard in plan_shards(groups, max_shard_size) for k, *_ in shard.tensors}
    found, made = ", ".join(merged.variants), ", ".join(variants)
    has = "has" if merged.nested else "lacks"
    are_cut = all(checkpoint.tensors[key].file.name == file for key, file in files.items())
    differences = {
        f"holds the variants {found}, but this build makes {made}": found != made,
        "stores another default policy than this build's": policy_to_store(policy, variants) != merged.policy,
        f"{has} a nested variant, unlike what this build makes": bool(merged.nested) != nested,
        "has shards of another size than this build's": not are_cut,
    }
    if wrong := [what for what, differs in differences.items() if differs]:
        raise FlexQuantError(f"{output} {wrong[0]}; {ADVICE}")


def _check_files(output: Path, sources: Sequence[tuple[str, str]]) -> None:
    """Raise FlexQuantError unless the files beside the weights equal those that merging would write."""
    expected = plan_sidecars([open_source(name, folder) for name, folder in sources]).files
    for name in sorted({*expected, *find_files(output, COPIED)}):
        paths = [path for path in (expected.get(name), output / name) if path and path.is_file()]
        if len(paths) < 2 or hash_file(paths[0]) != hash_file(paths[1]):
            raise FlexQuantError(f"{output} has another {name} than the variants; {ADVICE}")
