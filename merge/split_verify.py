# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Split a variant off a merged checkpoint, convert another format, and verify a merged checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flexquant.checkpoint import merged_checkpoint
from flexquant.checkpoint.folder import COPIED, RECIPE, find_files, find_model, read_config, recipe_name
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import SHARED_PREFIX
from flexquant.checkpoint.model_config import SECTIONS, JsonObject
from flexquant.checkpoint.output import prepare_output
from flexquant.checkpoint.safetensors_io import TensorRef, same_bytes, total_bytes
from flexquant.checkpoint.writer import DEFAULT_SHARD_SIZE, Progress, write_json, writing_checkpoint
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import Source, open_source
from flexquant.merge.merge_plan import check_parameters
from flexquant.merge.nesting import is_nearest
from flexquant.merge.same_model import model_differences, with_names


def split_checkpoint(
    folder: str | Path,
    variant: str,
    output: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Progress | None = None,
) -> JsonObject:
    """Write the variant to ``output``, bit-identical under original keys; return how many tensors and bytes.

    Raises FlexQuantError for an unknown variant, a tensor not as recorded, and what cannot be written.
    """
    output = Path(output)
    checkpoint = MergedCheckpoint.open(folder)
    checkpoint.check_variant(variant)
    prepare_output(output, [checkpoint.folder], overwrite=overwrite)
    keys = checkpoint.variant_keys(variant)
    tensors = checkpoint.variant_tensors(variant)
    files = find_files(checkpoint.folder, (*COPIED, own := recipe_name(variant)))
    files = {RECIPE if name == own else name: path for name, path in files.items()}
    recorded = checkpoint.provenance.tensors
    computed_from = [ref for weight in checkpoint.nested_weights(variant).values() for ref in weight.parts]
    merged_checkpoint.compare_recorded(checkpoint, {ref.name: ref for ref in computed_from}, None)

    config = checkpoint.source_config(variant)
    writing = writing_checkpoint(output, [tensors], files, overwrite=overwrite, max_shard_size=max_shard_size)
    with writing as (stage, finish):
        write_json(stage / "config.json", config)
        for name, digest in finish(progress).items():
            if name in keys and recorded.get(keys[name], digest) != digest:
                problem = f"tensor '{keys[name]}' in {folder} differs from its SHA-256 in"
                problem += f" {merged_checkpoint.PROVENANCE_FILE}"
                raise FlexQuantError(f"{problem}; fetch or merge the checkpoint again")
    return {"output": str(output), "variant": variant, "tensors": len(tensors), "bytes": total_bytes(tensors)}


def convert_checkpoint(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> JsonObject:
    """Write a checkpoint to ``output`` as merging reads it: in the format of compressed-tensors.

    ``dtype``, ``bfloat16`` or ``float16``, casts what is in 16 bit. Files that no variant needs are not
    copied. Returns what was converted. Raises FlexQuantError as :func:`~flexquant.merge.formats.open_source`
    does, for a checkpoint with nothing to convert, an output that may not be replaced and a full disk.
    """
    folder, output = find_model(folder), Path(output)
    stored = read_config(folder).get(SECTIONS[0])
    source = open_source("converted", folder, dtype)
    if dtype is None and (stored is None or stored == source.quantization_config):
        found = "is not quantised" if stored is None else "is in the format of compressed-tensors already"
        raise FlexQuantError(f"{folder} {found}; merge it as it is")
    check_parameters(source)
    prepare_output(output, [folder], overwrite=overwrite)
    files = find_files(folder, COPIED)
    config = {key: value for key, value in source.config.items() if key not in SECTIONS}
    config |= {} if stored is None else {SECTIONS[0]: source.quantization_config}
    with writing_checkpoint(output, [source.tensors], files, overwrite=overwrite) as (stage, finish):
        write_json(stage / "config.json", config)
        finish(progress)
    method = "16 bit" if stored is None else stored.get("quant_method")
    linears = sum(name.endswith(".weight_scale") for name in source.tensors)
    return {"output": str(output), "from": method, "linears": linears}


def verify_checkpoint(
    folder: str | Path,
    against: Mapping[str, str | Path] | Sequence[tuple[str, str | Path]] = (),
    progress: Progress | None = None,
) -> JsonObject:
    """Compare every tensor of a merged checkpoint, and return how many were compared with what.

    ``against`` are source folders by variant name; without them the recorded SHA-256 counts. A nested weight
    is equal to its source's if its differences lead nearest to the source's integers, and not too many miss
    them. Raises FlexQuantError, naming tensors and shards, or files, that differ, are missing, twice there or
    unknown.
    """
    checkpoint = MergedCheckpoint.open(folder)
    keys, variants = checkpoint.tensors.keys(), checkpoint.merged.variants.values()
    shared = [key.removeprefix(SHARED_PREFIX) for key in keys if key.startswith(SHARED_PREFIX)]
    if twice := sorted(keys & {variant.prefix + name for name in shared for variant in variants}):
        raise FlexQuantError(f"{folder} has '{twice[0]}' among the shared tensors too; merge it again")
    pairs = list(against.items()) if isinstance(against, Mapping) else list(against)
    merged_checkpoint.check_recorded_files(checkpoint)
    if pairs:
        dtype = checkpoint.provenance.dtype
        counts = {name: _check_source(checkpoint, open_source(name, f, dtype), progress) for name, f in pairs}
    else:
        counts = {"recorded hashes": merged_checkpoint.check_recorded_tensors(checkpoint, progress)}
    nested = [name for name in checkpoint.merged.nested if name in counts]
    return {"verified": str(folder), "tensors_compared_with": counts, "nested": nested}


def _check_source(checkpoint: MergedCheckpoint, source: Source, progress: Progress | None) -> int:
    checkpoint.check_variant(source.name)
    stored, nested = checkpoint.variant_tensors(source.name), checkpoint.nested_weights(source.name)
    source = with_names(source, stored.keys())
    merged_checkpoint.check_same_names(source.tensors.keys(), stored.keys(), source.folder, checkpoint.folder)
    merged_config = checkpoint.source_config(source.name)
    of_all = checkpoint.provenance.config_from in (None, source.name)
    differences = model_differences(source.config, merged_config) if of_all else []
    if source.quantization_config != checkpoint.merged.variants[source.name].quantization_config:
        differences.append(("quantization_config", "...", "..."))
    if differences:
        there = f"the config of variant '{source.name}' in {checkpoint.folder}"
        differing = differences[0][0]
        raise FlexQuantError(f"{there} differs from {source.folder} in '{differing}'; merge it again")

    def same(name: str, ref: TensorRef) -> bool:
        found, weight = source.tensors[name], name.removesuffix("_scale")
        if weight not in nested:
            return same_bytes(found, ref)
        scales = [tensors[f"{weight}_scale"] for tensors in (stored, source.tensors)]
        # A scale is judged with the weight that has it.
        return name != weight or is_nearest(nested[weight], scales[0], found, scales[1])

    return merged_checkpoint.compare_tensors(checkpoint, stored, same, str(source.folder), progress)
