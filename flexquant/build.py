# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From a 16-bit model to a merged checkpoint in one go: quantise, compare KV caches, merge, verify.

Each step's result appears only when it is complete, and nothing written depends on the time or the number of
attempts: a build that was killed and started again ends in the same bytes as an undisturbed one. A finished
variant's report tells all that went into it, and it is not quantised again; a finished checkpoint is only
verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexquant.checkpoint.contents import Report, make_report
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import count_layers
from flexquant.checkpoint.output import prepare_output, remove_leftovers
from flexquant.checkpoint.writer import DEFAULT_SHARD_SIZE
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, verify_checkpoint
from flexquant.policy.choose import choose_policy
from flexquant.policy.rules import load_policy
from flexquant.quantization.calibration_rows import Stage, no_stage
from flexquant.quantization.quantized_variant import QuantizedVariant
from flexquant.quantization.quantizing import quantize_variants
from flexquant.quantization.recipe import Recipe

STAGES_AFTER_QUANTISING = 2
"""How many stages :func:`build_checkpoint` enters after those of quantising: merging and verifying."""


@dataclass(frozen=True)
class Built:
    variants: list[QuantizedVariant]
    report: Report
    """What the merged checkpoint holds."""
    tensors_compared: dict[str, int]
    """Tensors found equal to each variant's, bit for bit."""


def build_checkpoint(
    model: str | Path,
    output: str | Path,
    recipe: Recipe,
    *,
    variants_folder: str | Path | None = None,
    policy: str | None = None,
    overwrite: bool = False,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Callable[[str], None] = lambda message: None,
    stage: Stage = no_stage,
    verbose: bool = False,
    **calibration: Any,
) -> Built:
    """Quantise ``model`` by ``recipe``, merge the variants into ``output`` and compare it with them.

    The variants stay in ``variants_folder`` (default: ``output`` with ``-variants`` behind its name).
    ``policy``, a built-in name or a file, becomes the checkpoint's default instead of the recipe's.
    ``overwrite`` replaces what is there and was made otherwise. ``calibration`` goes to
    :func:`~flexquant.quantization.quantizing.quantize_variants`, as do ``progress``, ``stage`` and
    ``verbose``; two stages follow on those of quantising.

    Raises FlexQuantError as the steps do; a policy or output that cannot be had is refused before the first.
    Without ``overwrite`` an ``output`` that exists has to be a merged checkpoint of these variants.
    """
    output = Path(output)
    folder = Path(variants_folder) if variants_folder else output.with_name(f"{output.name}-variants")
    policy = policy or recipe.policy
    _check_policy(policy, recipe)
    finished = output.exists() and not overwrite
    if finished:
        _check_finished(output, list(recipe.variants), policy)
        remove_leftovers(output)
    else:
        prepare_output(output, [folder], overwrite=overwrite)
    variants = quantize_variants(
        model,
        folder,
        recipe,
        resume=True,
        overwrite=overwrite,
        progress=progress,
        stage=stage,
        verbose=verbose,
        **calibration,
    )
    sources = [(variant.name, variant.folder) for variant in variants]
    if finished:
        with stage(f"{output} is merged already"):
            pass
    else:
        with stage(f"comparing the KV caches, and merging into {output}") as show:
            merge_checkpoints(
                sources,
                output,
                policy=policy,
                overwrite=overwrite,
                max_shard_size=max_shard_size,
                progress=show,
                kv_progress=show,
            )
    with stage(f"comparing {output} with the variants, bit for bit") as show:
        compared = verify_checkpoint(output, sources, show)["tensors_compared_with"]
    merged = MergedCheckpoint.open(output)
    report = make_report(merged.merged, count_layers(merged.config), merged.tensors)
    return Built(variants, report, compared)


def _check_policy(policy: str | None, recipe: Recipe) -> None:
    """Raise FlexQuantError unless the recipe makes the variants that the policy uses."""
    if policy is None and len(recipe.variants) == 1:
        return
    name, chosen = choose_policy(policy)
    for variant in chosen.variants:
        if variant not in recipe.variants:
            raise FlexQuantError(
                f"the policy '{name}' uses the variant '{variant}', but the recipe '{recipe.name}' makes "
                f"{', '.join(recipe.variants)}; choose another with --policy"
            )


def _check_finished(output: Path, variants: Sequence[str], policy: str | None) -> None:
    """Raise FlexQuantError unless ``output`` is a merged checkpoint of these variants and this policy."""
    if not (output / "config.json").is_file():
        raise FlexQuantError(f"{output} exists and is not a merged checkpoint; choose another folder")
    advice = "choose another folder, or replace it with --overwrite"
    try:
        merged = MergedCheckpoint.open(output).merged
    except FlexQuantError as e:
        raise FlexQuantError(f"{output} exists and cannot be gone on with ({e}); {advice}") from e
    if list(merged.variants) != list(variants):
        raise FlexQuantError(
            f"{output} holds the variants {', '.join(merged.variants)}, but this build makes "
            f"{', '.join(variants)}; {advice}"
        )
    if policy is not None and load_policy(policy).document != merged.policy:
        raise FlexQuantError(f"{output} stores another default policy than this build's; {advice}")
