# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build a merged checkpoint from a 16-bit model: quantise, compare the KV caches, merge and verify.

Each step's result appears only when it is complete: a build that was killed and restarted writes the same
bytes as an undisturbed one. A finished variant is not quantised again, as its report records all of its
inputs; a finished checkpoint is only verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.folder import COPIED, find_files
from flexquant.checkpoint.measured_loss import LossByKind
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import SHARED_PREFIX
from flexquant.checkpoint.model_config import count_layers
from flexquant.checkpoint.output import prepare_output, remove_leftovers
from flexquant.checkpoint.weight_bytes import CheckpointReport, report_checkpoint
from flexquant.checkpoint.writer import DEFAULT_SHARD_SIZE, plan_shards
from flexquant.documents.results import hash_file
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.formats import open_source
from flexquant.merge.merging import policy_to_store
from flexquant.merge.sidecar_plan import plan_sidecars
from flexquant.policy.rules import choose_policy
from flexquant.quantization.progress import Stage, no_stage, quiet_libraries
from flexquant.quantization.quantizing import quantize_variants
from flexquant.quantization.recipe import Recipe
from flexquant.quantization.report import QuantizedVariant
from flexquant.quantization.source_model import find_folder, read_source

STAGES_AFTER_QUANTISING = 2
"""Stages of :func:`build_checkpoint` after quantising: merging and verifying."""
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

    The variants stay in ``variants_folder`` (default: ``output`` with ``-variants`` appended to its name).
    ``policy``, a built-in name or a file, replaces the recipe's default policy. ``nested`` stores W8A8 as
    ``near`` does in :func:`merge_checkpoints`. ``overwrite`` replaces folders that other inputs made.
    ``progress``, ``verbose`` and ``quantizing`` are further arguments of
    :func:`~flexquant.quantization.quantizing.quantize_variants`; STAGES_AFTER_QUANTISING stages follow its,
    with ``nested`` one more.

    Raises FlexQuantError as the steps do; a policy or output that is not possible is refused before the first
    step. Without ``overwrite`` an existing ``output`` has to be a merged checkpoint of these variants.
    """
    output = Path(output)
    folder = Path(variants_folder) if variants_folder else output.with_name(f"{output.name}-variants")
    policy = policy or recipe.policy
    _check_policy(policy, recipe)
    finished = output.exists() and not overwrite
    if finished:
        _check_finished(output, list(recipe.variants), policy, nested, max_shard_size)
        remove_leftovers(output)
    else:
        prepare_output(output, [folder], overwrite=overwrite)
    shown: dict[str, Any] = {"progress": progress, "stage": stage, "verbose": verbose}
    variants = quantize_variants(
        model, folder, recipe, resume=True, overwrite=overwrite, **shown, **quantizing
    )
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
    losses: dict[str, LossByKind] = {}
    if nested:
        with stage("measuring what is lost as it is stored"):
            losses = _measure_nested(model, output, progress, verbose)
    merged = MergedCheckpoint.open(output)
    missed = merged.provenance.changed_integers, merged.provenance.added_noise
    report = report_checkpoint(merged.merged, count_layers(merged.config), merged.tensors, *missed)
    return BuildResult(variants, report, compared, losses)


def _measure_nested(
    model: str | Path, merged: Path, progress: Callable[[str], None], verbose: bool
) -> dict[str, LossByKind]:
    """Return what each nested variant of ``merged`` lost against the 16-bit ``model``, by kind of text."""
    losses: dict[str, LossByKind] = {}
    with nullcontext() if verbose else quiet_libraries(progress):
        from flexquant.quantization.loss import measure_loss, read_reference
        from flexquant.quantization.oneshot import load_quantized, load_whole

        folder = find_folder(model, progress)
        reference = read_reference(load_whole(read_source(folder)), load_tokenizer(folder))
        for name in MergedCheckpoint.open(merged).merged.nested:
            with TemporaryDirectory(dir=merged.parent) as work:
                split_checkpoint(merged, name, Path(work) / name)
                losses[name] = measure_loss(load_quantized(Path(work) / name), reference)
    return losses


def _check_policy(policy: str | None, recipe: Recipe) -> None:
    """Raise FlexQuantError unless the recipe makes the variants that the policy uses."""
    if policy is None and len(recipe.variants) == 1:
        return
    chosen = choose_policy(policy)
    for variant in chosen.variants:
        if variant not in recipe.variants:
            raise FlexQuantError(
                f"the policy '{chosen.name}' uses the variant '{variant}', but the recipe '{recipe.name}' "
                f"makes {', '.join(recipe.variants)}; choose another with --policy"
            )


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
    for differs, what in (
        (found != made, f"holds the variants {found}, but this build makes {made}"),
        (
            policy_to_store(policy, variants) != merged.policy,
            "stores another default policy than this build's",
        ),
        (
            bool(merged.nested) != nested,
            f"{'has' if merged.nested else 'lacks'} a nested variant, unlike what this build makes",
        ),
        (
            any(checkpoint.tensors[k].file.name != file for k, file in files.items()),
            "has shards of another size than this build's",
        ),
    ):
        if differs:
            raise FlexQuantError(f"{output} {what}; {ADVICE}")


def _check_files(output: Path, sources: Sequence[tuple[str, str]]) -> None:
    """Raise FlexQuantError unless the files beside the weights equal those that merging would write."""
    expected = plan_sidecars([open_source(name, folder) for name, folder in sources]).files
    for name in sorted({*expected, *find_files(output, COPIED)}):
        paths = [path for path in (expected.get(name), output / name) if path and path.is_file()]
        if len(paths) < 2 or hash_file(paths[0]) != hash_file(paths[1]):
            raise FlexQuantError(f"{output} has another {name} than the variants; {ADVICE}")
