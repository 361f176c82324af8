# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write a plain checkpoint of compressed-tensors: one variant of a merged one, or another format's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flexquant.checkpoint.folder import (
    COPIED,
    RECIPE,
    check_folder,
    confined_file,
    find_files,
    find_model,
    quantization_section,
    read_json,
    recipe_name,
)
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, MergedCheckpoint
from flexquant.checkpoint.model_config import SECTIONS, JsonObject
from flexquant.checkpoint.output import check_free_space, prepare_output, staged_folder
from flexquant.checkpoint.safetensors_io import TensorRef, total_bytes
from flexquant.checkpoint.writer import (
    DEFAULT_SHARD_SIZE,
    Progress,
    copy_files,
    needed_bytes,
    plan_shards,
    write_json,
    writing_shards,
)
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import open_source
from flexquant.merge.merge_plan import check_parameters


def write_plain_checkpoint(
    output: Path,
    tensors: Mapping[str, TensorRef],
    config: JsonObject,
    files: Mapping[str, Path],
    *,
    overwrite: bool,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Progress | None = None,
    check: Callable[[Mapping[str, str]], None] = lambda digests: None,
) -> None:
    """Write ``tensors``, ``config.json`` and copies of ``files``, by name, to ``output``.

    The output appears only when it is complete and ``check``, which gets the SHA-256 of every tensor, has not
    raised. Raises FlexQuantError for a full disk, a tensor that cannot be read and what appeared meanwhile.
    """
    shards = plan_shards([tensors], max_shard_size)
    check_free_space(output, needed_bytes(shards, files.values()))
    with staged_folder(output, overwrite=overwrite) as stage, writing_shards(stage, shards) as finish:
        copy_files(files, stage)
        check(finish(progress))
        write_json(stage / "config.json", config)


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


def convert_checkpoint(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> JsonObject:
    """Write a checkpoint to ``output`` as merging reads it: in the format of compressed-tensors.

    Quantised values do not change. ``dtype``, ``bfloat16`` or ``float16``, casts what is in 16 bit; None
    leaves it. Files that no variant needs are not copied.

    Returns what was converted. Raises FlexQuantError as :func:`~flexquant.merge.formats.open_source` does,
    for a checkpoint with nothing to convert, an output that may not be replaced and a full disk.
    """
    folder, output = find_model(folder), Path(output)
    check_folder(folder)
    stored = quantization_section(folder, read_json(confined_file(folder, "config.json")))
    source = open_source("converted", folder, dtype)
    if dtype is None and (stored is None or stored == source.quantization_config):
        found = "is not quantised" if stored is None else "is in the format of compressed-tensors already"
        raise FlexQuantError(f"{folder} {found}; merge it as it is")
    check_parameters(source)
    prepare_output(output, [folder], overwrite=overwrite)
    files = find_files(folder, COPIED)
    config = {key: value for key, value in source.config.items() if key not in SECTIONS}
    config[SECTIONS[0]] = source.quantization_config
    write_plain_checkpoint(output, source.tensors, config, files, overwrite=overwrite, progress=progress)
    method = "16 bit" if stored is None else stored.get("quant_method")
    linears = sum(name.endswith(".weight_scale") for name in source.tensors)
    return {"output": str(output), "from": method, "linears": linears}
