# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write one variant of a merged checkpoint as the plain checkpoint that it was merged from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import prepare_output
from flexquant.checkpoint.provenance import PROVENANCE_FILE
from flexquant.checkpoint.safetensors_io import total_bytes
from flexquant.checkpoint.sidecars import COPIED, RECIPE, find_files, recipe_name
from flexquant.checkpoint.writer import DEFAULT_SHARD_SIZE, Progress
from flexquant.errors import FlexQuantError
from flexquant.merge.plain_checkpoint import write_plain_checkpoint


def split_checkpoint(
    folder: str | Path,
    variant: str,
    output: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Progress | None = None,
) -> JsonObject:
    """Write the variant to ``output``: its original keys, bit-identical tensors, a config of equal effect.

    Returns how many tensors and bytes were written. Raises FlexQuantError for an unknown variant, a tensor
    that no longer has its recorded hash, an output that may not be replaced and a full disk.
    """
    output = Path(output)
    checkpoint = MergedCheckpoint.open(folder)
    checkpoint.check_variant(variant)
    prepare_output(output, [checkpoint.folder], overwrite=overwrite)
    keys = checkpoint.variant_keys(variant)
    tensors = checkpoint.variant_tensors(variant)
    files = _plan_files(checkpoint, variant)
    recorded = checkpoint.provenance.tensors

    def check(digests: Mapping[str, str]) -> None:
        for name, digest in digests.items():
            if recorded.get(keys[name], digest) != digest:
                raise FlexQuantError(
                    f"tensor '{keys[name]}' in {folder} differs from its recorded SHA-256 in "
                    f"{PROVENANCE_FILE}; fetch or merge the checkpoint again"
                )

    write_plain_checkpoint(
        output,
        tensors,
        checkpoint.source_config(variant),
        files,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        progress=progress,
        check=check,
    )
    return {"output": str(output), "variant": variant, "tensors": len(tensors), "bytes": total_bytes(tensors)}


def _plan_files(checkpoint: MergedCheckpoint, variant: str) -> dict[str, Path]:
    """Return the files to copy: name in the plain checkpoint -> path."""
    files = find_files(checkpoint.folder, (*COPIED, own := recipe_name(variant)))
    return {RECIPE if name == own else name: path for name, path in files.items()}
