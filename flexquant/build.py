# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From a 16-bit model to a merged checkpoint in one go: quantise, compare KV caches, merge, verify.

Each step's result appears only when it is complete, and nothing written depends on the time or the number of
attempts: a build that was killed and started again ends in the same bytes as an undisturbed one. A finished
variant carries the fingerprint of all that went into it and is not quantised again; a finished checkpoint is
only verified.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, verify_checkpoint
from flexquant.merge.logical import count_layers
from flexquant.merge.merged import MergedCheckpoint
from flexquant.merge.report import Report, make_report
from flexquant.merge.staging import prepare_output
from flexquant.merge.writer import DEFAULT_SHARD_SIZE, Progress
from flexquant.policy import DEFAULT_POLICY, load_policy
from flexquant.quantization.recipe import Recipe
from flexquant.quantization.variants import QuantizedVariant, quantize_variants

Bar = Callable[..., AbstractContextManager[Progress | None]]
"""Shows one step's progress: called with a title (and a unit other than bytes), it gives what to call."""


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
    bar: Bar = lambda title, **unit: nullcontext(),
    **calibration: Any,
) -> Built:
    """Quantise ``model`` by ``recipe``, merge the variants into ``output`` and compare it with them.

    The variants stay in ``variants_folder`` (default: ``output`` with ``-variants`` behind its name).
    ``policy``, a built-in name or a file, becomes the checkpoint's default instead of the recipe's.
    ``overwrite`` replaces what is there and was made otherwise. ``calibration`` goes to
    :func:`~flexquant.quantization.variants.quantize_variants`. ``progress`` receives one line per step.

    Raises FlexQuantError as the steps do; a policy or output that cannot be had is refused before the first.
    """
    output = Path(output)
    folder = Path(variants_folder) if variants_folder else output.with_name(f"{output.name}-variants")
    policy = policy or recipe.policy
    _check_policy(policy, recipe)
    finished = output.exists() and not overwrite
    if not finished:
        prepare_output(output, [folder], overwrite=overwrite)
    variants = quantize_variants(
        model, folder, recipe, resume=True, overwrite=overwrite, progress=progress, **calibration
    )
    sources = [(variant.name, variant.folder) for variant in variants]
    if not finished:
        progress(f"merging {', '.join(name for name, _ in sources)} into {output}")
        with bar("comparing the KV caches", unit=" layers") as comparing, bar("merging") as merging:
            merge_checkpoints(
                sources,
                output,
                policy=policy,
                overwrite=overwrite,
                max_shard_size=max_shard_size,
                progress=merging,
                kv_progress=comparing,
            )
    progress(f"verifying {output}")
    with bar("verifying") as verifying:
        compared = _verify(output, sources, policy, verifying)
    merged = MergedCheckpoint.open(output)
    report = make_report(merged.merged, count_layers(merged.config), merged.tensors)
    return Built(variants, report, compared)


def _check_policy(policy: str | None, recipe: Recipe) -> None:
    """Raise FlexQuantError unless the recipe makes the variants that the policy uses."""
    if policy is None and len(recipe.variants) == 1:
        return
    name = policy or DEFAULT_POLICY
    for variant in load_policy(name).variants:
        if variant not in recipe.variants:
            raise FlexQuantError(
                f"the policy '{name}' uses the variant '{variant}', but the recipe '{recipe.name}' makes "
                f"{', '.join(recipe.variants)}; choose another with --policy"
            )


def _verify(
    output: Path, sources: list[tuple[str, str]], policy: str | None, progress: Progress | None
) -> dict[str, int]:
    """Compare the checkpoint with its variants, whether written now or by an earlier build."""
    merged = MergedCheckpoint.open(output).merged
    same = list(merged.variants) == [name for name, _ in sources]
    if not same or (policy is not None and load_policy(policy).document != merged.policy):
        raise FlexQuantError(
            f"{output} holds other variants or another default policy than this build makes; choose another "
            "folder, or replace it with --overwrite"
        )
    return verify_checkpoint(output, sources, progress)["tensors_compared_with"]
