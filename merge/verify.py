# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check a merged checkpoint against its recorded hashes, or bit by bit against its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flexquant.checkpoint.merged_checkpoint import (
    MergedCheckpoint,
    check_recorded_files,
    check_recorded_tensors,
    check_same_names,
    match_each,
    report_differences,
)
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import same_bytes
from flexquant.checkpoint.source import Source
from flexquant.checkpoint.writer import Progress
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import open_source
from flexquant.merge.same_model import model_differences, with_names


def verify_checkpoint(
    folder: str | Path,
    against: Mapping[str, str | Path] | Sequence[tuple[str, str | Path]] = (),
    progress: Progress | None = None,
) -> JsonObject:
    """Compare every tensor of a merged checkpoint, and return how many were compared with what.

    Tensors are compared with the source folders in ``against``, by variant name; without ``against``, with
    the recorded SHA-256. Raises FlexQuantError that names the tensors (with their shards) or files that
    differ, are missing or should not be there.
    """
    checkpoint = MergedCheckpoint.open(folder)
    pairs = list(against.items()) if isinstance(against, Mapping) else list(against)
    check_recorded_files(checkpoint)
    if pairs:
        dtype = checkpoint.provenance.dtype
        counts = {name: _check_source(checkpoint, open_source(name, f, dtype), progress) for name, f in pairs}
    else:
        counts = {"recorded hashes": check_recorded_tensors(checkpoint, progress)}
    return {"verified": str(folder), "tensors_compared_with": counts}


def _check_source(checkpoint: MergedCheckpoint, source: Source, progress: Progress | None) -> int:
    checkpoint.check_variant(source.name)
    stored = checkpoint.variant_tensors(source.name)
    source = with_names(source, stored.keys())
    check_same_names(set(source.tensors), set(stored), str(source.folder), str(checkpoint.folder))
    merged_config = checkpoint.source_config(source.name)
    of_all = checkpoint.provenance.config_from in (None, source.name)
    differences = model_differences(source.config, merged_config) if of_all else []
    if source.quantization_config != merged_config["quantization_config"]:
        differences.append(("quantization_config", "...", "..."))
    if differences:
        raise FlexQuantError(
            f"the config of variant '{source.name}' in {checkpoint.folder} differs from {source.folder} in "
            f"'{differences[0][0]}'; merge it again"
        )
    matches = match_each(source.tensors, lambda name, ref: same_bytes(ref, stored[name]), progress)
    places = {name: f"{name} in {ref.file.name}" for name, ref in stored.items()}
    report_differences(checkpoint, matches, places, str(source.folder))
    return len(matches)
