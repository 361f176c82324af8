# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check, by recorded hashes, that a merged checkpoint is exactly what the merge wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from flexquant.checkpoint.folder import INDEX_FILE, confined_file
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.provenance import PROVENANCE_FILE
from flexquant.checkpoint.safetensors_io import TensorRef, read_chunks, total_bytes
from flexquant.checkpoint.writer import MAX_THREADS, Progress
from flexquant.documents.digest import hash_file
from flexquant.errors import FlexQuantError

MAX_NAMED = 5
UNRECORDED = (PROVENANCE_FILE, INDEX_FILE, "README.md")
"""Files that the merge writes without recording a hash; users may edit the card."""
BOOKKEEPING = (".git", ".gitattributes", ".cache")
"""Files and folders that git and downloads from the hub add; nothing that loads a model reads them."""


def check_recorded_files(checkpoint: MergedCheckpoint) -> None:
    """Raise FlexQuantError for a file that differs from its recorded hash, and for one that was not recorded.

    If the checkpoint records no files, nothing is checked.
    """
    files = checkpoint.provenance.files
    if added := _unknown_files(checkpoint) if files else []:
        raise FlexQuantError(
            f"{checkpoint.folder} has {len(added)} file(s) that the merge did not write ({_listed(added)}); "
            "remove them, or merge again"
        )
    for name, recorded in files.items():
        if hash_file(confined_file(checkpoint.folder, name)) != recorded:
            raise FlexQuantError(
                f"{checkpoint.folder / name} was changed after merging (its SHA-256 is not the one in "
                f"{PROVENANCE_FILE}); restore it, or merge again"
            )


def check_recorded_tensors(checkpoint: MergedCheckpoint, progress: Progress | None = None) -> int:
    """Compare every tensor with its recorded hash, and return the number of tensors.

    Raises FlexQuantError, which names tensors and their shards, if a tensor differs, is missing or was not
    recorded, and for a checkpoint without recorded hashes.
    """
    recorded = checkpoint.provenance.tensors
    if not recorded:
        raise FlexQuantError(
            f"{checkpoint.folder} has no tensor hashes in {PROVENANCE_FILE}; compare with the sources: "
            "flexquant verify --against NAME=FOLDER"
        )
    check_same_names(set(recorded), set(checkpoint.tensors), PROVENANCE_FILE, str(checkpoint.folder))
    matches = match_each(checkpoint.tensors, lambda key, ref: _hash(ref) == recorded[key], progress)
    places = {key: f"{key} in {ref.file.name}" for key, ref in checkpoint.tensors.items()}
    report_differences(checkpoint, matches, places, f"their recorded SHA-256 in {PROVENANCE_FILE}")
    return len(matches)


def match_each(
    tensors: Mapping[str, TensorRef], check: Callable[[str, TensorRef], bool], progress: Progress | None
) -> dict[str, bool]:
    """Return the result of ``check`` for every tensor, by name; several threads read at a time."""
    total, done, matches = total_bytes(tensors), 0, {}
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


def check_same_names(expected: set[str], found: set[str], expected_in: str, found_in: str) -> None:
    """Raise FlexQuantError unless both places have the same tensor names."""
    for names, has, lacks in (
        (expected - found, expected_in, found_in),
        (found - expected, found_in, expected_in),
    ):
        if names:
            raise FlexQuantError(
                f"{has} has {len(names)} tensor(s) that {lacks} lacks ({_listed(sorted(names))}); merge it "
                "again"
            )


def report_differences(
    checkpoint: MergedCheckpoint, matches: Mapping[str, bool], places: Mapping[str, str], measure: str
) -> None:
    """Raise FlexQuantError for tensors that do not match; ``places`` maps each to its name and shard."""
    differing = [places[name] for name, same in matches.items() if not same]
    if differing:
        raise FlexQuantError(
            f"{len(differing)} of {len(matches)} tensors in {checkpoint.folder} differ from {measure} "
            f"({_listed(sorted(differing))}); fetch or merge the checkpoint again"
        )


def _unknown_files(checkpoint: MergedCheckpoint) -> list[str]:
    """Return the files that are neither recorded nor hold tensors; links to folders count as files."""
    folder = checkpoint.folder
    shards = {ref.file for ref in checkpoint.tensors.values()}
    known = shards | {folder / name for name in (*UNRECORDED, *checkpoint.provenance.files)}
    files = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    names = (path.relative_to(folder) for path in sorted(files - known))
    return [name.as_posix() for name in names if name.parts[0] not in BOOKKEEPING]


def _hash(ref: TensorRef) -> str:
    digest = hashlib.sha256()
    for chunk in read_chunks(ref):
        digest.update(chunk)
    return digest.hexdigest()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
