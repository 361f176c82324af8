# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check a merged checkpoint: against its recorded hashes, or bit by bit against its sources."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flexquant.checkpoint.folder import confined_file
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.provenance import PROVENANCE_FILE, hash_file
from flexquant.checkpoint.safetensors_io import TensorRef, read_chunks, same_bytes
from flexquant.checkpoint.source import Source
from flexquant.checkpoint.writer import MAX_THREADS, Progress
from flexquant.errors import FlexQuantError
from flexquant.merge.same_model import model_differences

MAX_NAMED = 5


def verify_checkpoint(
    folder: str | Path,
    against: Mapping[str, str | Path] | Sequence[tuple[str, str | Path]] = (),
    progress: Progress | None = None,
) -> JsonObject:
    """Read every tensor of a merged checkpoint and compare it; return what was compared, counted.

    Without ``against`` the recorded SHA-256 are the measure, with it the named variants' source folders.
    Raises FlexQuantError naming the tensors or files that differ, are missing or are too many.
    """
    checkpoint = MergedCheckpoint.open(folder)
    pairs = list(against.items()) if isinstance(against, Mapping) else list(against)
    if checkpoint.provenance is not None:
        _check_files(checkpoint, checkpoint.provenance)
    if pairs:
        counts = {name: _check_source(checkpoint, Source.open(name, f), progress) for name, f in pairs}
    else:
        counts = {"recorded hashes": _check_hashes(checkpoint, progress)}
    return {"verified": str(folder), "tensors_compared_with": counts}


def _check_files(checkpoint: MergedCheckpoint, provenance: JsonObject) -> None:
    for name, recorded in provenance.get("files", {}).items():
        if hash_file(confined_file(checkpoint.folder, name)) != recorded:
            raise FlexQuantError(
                f"{checkpoint.folder / name} was changed after merging (its SHA-256 is not the one in "
                f"{PROVENANCE_FILE}); restore it, or merge again"
            )


def _check_hashes(checkpoint: MergedCheckpoint, progress: Progress | None) -> int:
    recorded = (checkpoint.provenance or {}).get("tensors")
    if not recorded:
        raise FlexQuantError(
            f"{checkpoint.folder} has no tensor hashes in {PROVENANCE_FILE}; compare with the sources: "
            "--against NAME=FOLDER"
        )
    _check_same_names(set(recorded), set(checkpoint.tensors), PROVENANCE_FILE, str(checkpoint.folder))
    matches = _for_each(checkpoint.tensors, lambda key, ref: _hash(ref) == recorded[key], progress)
    _report_differences(matches, f"their recorded SHA-256 in {PROVENANCE_FILE}", checkpoint.folder)
    return len(matches)


def _check_source(checkpoint: MergedCheckpoint, source: Source, progress: Progress | None) -> int:
    checkpoint.check_variant(source.name)
    keys = checkpoint.variant_keys(source.name)
    _check_same_names(set(source.tensors), set(keys), str(source.folder), str(checkpoint.folder))
    merged_config = checkpoint.source_config(source.name)
    differences = model_differences(source.config, merged_config)
    if source.quantization_config != merged_config["quantization_config"]:
        differences.append(("quantization_config", "...", "..."))
    if differences:
        raise FlexQuantError(
            f"the config of variant '{source.name}' in {checkpoint.folder} differs from {source.folder} in "
            f"'{differences[0][0]}'; merge it again"
        )
    matches = _for_each(
        source.tensors, lambda name, ref: same_bytes(ref, checkpoint.tensors[keys[name]]), progress
    )
    _report_differences(matches, str(source.folder), checkpoint.folder)
    return len(matches)


def _for_each(
    tensors: Mapping[str, TensorRef], check: Callable[[str, TensorRef], bool], progress: Progress | None
) -> dict[str, bool]:
    total, done, matches = sum(ref.nbytes for ref in tensors.values()), 0, {}
    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    try:
        futures = {name: pool.submit(check, name, ref) for name, ref in tensors.items()}
        for name, future in futures.items():
            matches[name] = future.result()
            done += tensors[name].nbytes
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return matches


def _hash(ref: TensorRef) -> str:
    digest = hashlib.sha256()
    for chunk in read_chunks(ref):
        digest.update(chunk)
    return digest.hexdigest()


def _check_same_names(expected: set[str], found: set[str], expected_in: str, found_in: str) -> None:
    for names, has, lacks in (
        (expected - found, expected_in, found_in),
        (found - expected, found_in, expected_in),
    ):
        if names:
            raise FlexQuantError(
                f"{has} has {len(names)} tensor(s) that {lacks} lacks ({_listed(names)}); merge it again"
            )


def _report_differences(matches: Mapping[str, bool], measure: str, folder: Path) -> None:
    differing = [name for name, same in matches.items() if not same]
    if differing:
        raise FlexQuantError(
            f"{len(differing)} of {len(matches)} tensors in {folder} differ from {measure} "
            f"({_listed(differing)}); fetch or merge the checkpoint again"
        )


def _listed(names: Sequence[str] | set[str]) -> str:
    some = sorted(names)[:MAX_NAMED]
    return ", ".join(some) + (", ..." if len(names) > MAX_NAMED else "")
