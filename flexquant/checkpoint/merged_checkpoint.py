# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open a merged checkpoint, and check by recorded hashes that it is exactly what the merge wrote.

``flexquant_provenance.json`` has the sources, versions of tools and hashes, and no time and no absolute path.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, ValidationError

from flexquant.checkpoint.folder import (
    INDEX_FILE,
    SHARDS,
    confined_file,
    find_model,
    read_config,
    read_json,
    read_tensors,
    wrong_key,
)
from flexquant.checkpoint.merged_config import CONFIG_FILE, SHARED_PREFIX, MergedConfig, read_model_config
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.nested import NestedWeight, nested_weights, with_weights
from flexquant.checkpoint.safetensors_io import TensorRef, Tensors, read_chunks
from flexquant.checkpoint.writer import MAX_THREADS, Progress, Result, results_of
from flexquant.documents.results import digest_of, hash_file
from flexquant.errors import FlexQuantError

PROVENANCE_FILE = "flexquant_provenance.json"
SCHEMA: Literal["flexquant.provenance/v1"] = "flexquant.provenance/v1"
NOT_COMPUTED = ("kv_compatibility", "policy")
"""Keys of ``quantization_config`` that do not change what a model computes in a plan."""
MAX_NAMED = 5
UNRECORDED = (PROVENANCE_FILE, INDEX_FILE, "README.md")
"""Files that the merge writes without recording a hash; users may edit the card."""
BOOKKEEPING = (".git", ".gitattributes", ".cache")
"""Files and folders that git and downloads from the hub add; nothing that loads a model reads them."""


class RecordedSource(BaseModel):
    """What is read of the entry of one source."""

    folder: str = ""
    """The folder's name, or ``org/model@revision``."""
    transformers_version: str | None = None
    """The one that its ``config.json`` stated."""


class Provenance(BaseModel):
    """The keys of the document that are read; all are empty if the document has been removed."""

    document: Literal["flexquant.provenance/v1"] = Field(default=SCHEMA, validation_alias="schema")
    sources: dict[str, RecordedSource] = {}
    dtype: str | None = None
    """The dtype that what is in 16 bit was cast to; None: nothing was cast."""
    config_from: str | None = None
    """The source whose config was chosen; None: all had the same."""
    files: dict[str, str] = {}
    tensors: dict[str, str] = {}
    """Merged key -> SHA-256 of the tensor in hexadecimal."""
    changed_integers: dict[str, int] = {}
    """Nested variant -> how many of its INT8 weights are not its source's."""
    added_noise: dict[str, float] = {}
    """Nested variant -> by what share of its rounding noise the error of its INT8 weights is larger."""


def read_provenance(folder: Path) -> Provenance:
    """Return a merged checkpoint's provenance; raise FlexQuantError for a malformed document."""
    if not (folder / PROVENANCE_FILE).exists():
        return Provenance()
    file = confined_file(folder, PROVENANCE_FILE)
    try:
        return Provenance.model_validate(read_json(file))
    except ValidationError as e:
        raise FlexQuantError(f"{file} has {wrong_key(e)}; fetch or merge the checkpoint again") from e


def weights_identity(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a model's tensors, which are all read, and of what its config means for them."""
    config = read_config(folder)
    section = config.get("quantization_config") or {}
    config["quantization_config"] = {key: section[key] for key in section if key not in NOT_COMPUTED}
    tensors = read_tensors(folder) if any(folder.glob(SHARDS)) else {}
    return {CONFIG_FILE: digest_of(config), "tensors": hash_tensors(tensors)}


def hash_tensors(tensors: Tensors, read: Callable[[TensorRef], Iterable[memoryview]] = read_chunks) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes; ``read`` yields the bytes of a tensor."""
    return digest_of(match_each(tensors, lambda _, ref: (ref.dtype, ref.shape, _hash(ref, read)), None))


def folder_label(folder: Path) -> str:
    """Return a folder's name, or ``org/model@revision`` for a folder in the Hugging Face hub's cache."""
    folder = folder.absolute() if folder.parent.name == "snapshots" else folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"
    return os.fsencode(folder.name).decode(errors="replace")


@dataclass(frozen=True)
class MergedCheckpoint:
    """The folder that ``flexquant merge`` wrote."""

    folder: Path
    config: JsonObject
    merged: MergedConfig
    tensors: dict[str, TensorRef]
    """Merged key, prefix included -> reference to the tensor."""
    provenance: Provenance

    @classmethod
    def open(cls, folder: str | Path, *, published: bool = False) -> Self:
        """Open a merged checkpoint, or a ``published`` one; raise FlexQuantError for any other."""
        folder = find_model(folder)
        config, merged = read_model_config(folder)
        if not published and any(not variant.prefix for variant in merged.variants.values()):
            raise FlexQuantError(f"{folder} is no merged checkpoint; create one with 'flexquant merge'")
        tensors = read_tensors(folder)
        for key in tensors:
            merged.check_key(key, str(folder))
        return cls(folder, config, merged, tensors, read_provenance(folder))

    def check_variant(self, name: str) -> None:
        """Raise FlexQuantError unless the checkpoint has the variant."""
        if name not in self.merged.variants:
            names = ", ".join(self.merged.variants)
            raise FlexQuantError(f"{self.folder} has no variant '{name}'; it has {names}")

    def variant_keys(self, name: str) -> dict[str, str]:
        """Return a variant's stored tensors, shared ones included: original key -> merged key."""
        prefixes = SHARED_PREFIX, self.merged.variants[name].prefix
        found = [(prefix, key) for prefix in prefixes for key in self.tensors if key.startswith(prefix)]
        return {key.removeprefix(prefix): key for prefix, key in found}

    def variant_tensors(self, name: str) -> dict[str, TensorRef]:
        """Return a variant's tensors as served, by original key; raise FlexQuantError for unfit parts."""
        stored = self._stored(name)
        nested = self.nested_weights(name)
        return with_weights(stored, nested) if nested else stored

    def nested_weights(self, name: str) -> dict[str, NestedWeight]:
        """Return the INT8 weights that are computed, by original key; raise as `variant_tensors` does."""
        source = self.merged.variants[name].nested_in
        if source is None:
            return {}
        if not (found := nested_weights(self._stored(name), self._stored(source))):
            problem = f"variant '{name}' of {self.folder} has nested_in '{source}'"
            raise FlexQuantError(f"{problem}, but no differences to its weights; merge it again")
        return found

    def _stored(self, name: str) -> dict[str, TensorRef]:
        return {original: self.tensors[key] for original, key in self.variant_keys(name).items()}

    def source_config(self, name: str) -> JsonObject:
        """Return the ``config.json`` that the variant had before merging (without ``_name_or_path``)."""
        variant = self.merged.variants[name]
        section = variant.quantization_config
        own = {"architectures": [self.merged.base_architecture], "quantization_config": section}
        config = self.config | own
        if variant.is_in_16_bit and not (section.get("kv_cache_scheme") or section.get("transform_config")):
            del config["quantization_config"]
        origin = self.provenance.sources.get(name)
        if origin is not None and origin.transformers_version:
            config["transformers_version"] = origin.transformers_version
        return config


def check_recorded_files(checkpoint: MergedCheckpoint) -> None:
    """Raise FlexQuantError for a file that is not recorded, or not as recorded, if any are recorded."""
    files = checkpoint.provenance.files
    if added := _unknown_files(checkpoint) if files else []:
        problem = f"{checkpoint.folder} has {len(added)} file(s) that the merge did not write"
        raise FlexQuantError(f"{problem} ({_listed(added)}); remove them, or merge again")
    for name, recorded in files.items():
        if hash_file(confined_file(checkpoint.folder, name)) != recorded:
            why = f"its SHA-256 is not the one in {PROVENANCE_FILE}"
            changed = f"{checkpoint.folder / name} was changed after merging"
            raise FlexQuantError(f"{changed} ({why}); restore it, or merge again")


def check_recorded_tensors(checkpoint: MergedCheckpoint, progress: Progress | None = None) -> int:
    """Return the number of tensors; raise FlexQuantError unless these are those recorded, by their hashes."""
    recorded, tensors = checkpoint.provenance.tensors, checkpoint.tensors
    if not recorded:
        problem = f"{checkpoint.folder} has no tensor hashes in {PROVENANCE_FILE}"
        raise FlexQuantError(f"{problem}; compare with the sources: flexquant verify --against NAME=FOLDER")
    check_same_names(recorded.keys(), tensors.keys(), PROVENANCE_FILE, checkpoint.folder)
    return compare_recorded(checkpoint, tensors, progress)


def compare_recorded(checkpoint: MergedCheckpoint, tensors: Tensors, progress: Progress | None) -> int:
    """Return the number of ``tensors``, by merged key; raise FlexQuantError if a recorded hash is another."""

    def same(key: str, ref: TensorRef) -> bool:
        return checkpoint.provenance.tensors.get(key) in (None, _hash(ref))

    measure = f"their recorded SHA-256 in {PROVENANCE_FILE}"
    return compare_tensors(checkpoint, tensors, same, measure, progress)


def match_each(
    tensors: Tensors, check: Callable[[str, TensorRef], Result], progress: Progress | None
) -> dict[str, Result]:
    """Return the result of ``check`` for every tensor, by name; several threads read at a time."""
    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    try:
        futures = {name: pool.submit(check, name, ref) for name, ref in tensors.items()}
        return results_of(futures, tensors, progress)
    finally:
        pool.shutdown(cancel_futures=True)


def check_same_names(expected: Set[str], found: Set[str], expected_in: object, found_in: object) -> None:
    """Raise FlexQuantError unless both places have the same tensor names."""
    places = ((expected - found, expected_in, found_in), (found - expected, found_in, expected_in))
    for names, has, lacks in places:
        if names:
            more = f"{len(names)} tensor(s) that {lacks} lacks ({_listed(sorted(names))})"
            raise FlexQuantError(f"{has} has {more}; merge it again")


def compare_tensors(
    checkpoint: MergedCheckpoint,
    tensors: Tensors,
    same: Callable[[str, TensorRef], bool],
    measure: str,
    progress: Progress | None,
) -> int:
    """Return the number of ``tensors``; raise FlexQuantError, naming them, if some are not ``same``."""
    matches = match_each(tensors, same, progress)
    differing = [f"{name} in {tensors[name].file.name}" for name, is_same in matches.items() if not is_same]
    if differing:
        problem = f"{len(differing)} of {len(matches)} tensors in {checkpoint.folder} differ from {measure}"
        named = _listed(sorted(differing))
        raise FlexQuantError(f"{problem} ({named}); fetch or merge the checkpoint again")
    return len(matches)


def _unknown_files(checkpoint: MergedCheckpoint) -> list[str]:
    """Return the files that are neither recorded nor hold tensors; links to folders count as files."""
    folder = checkpoint.folder
    shards = {ref.file for ref in checkpoint.tensors.values()}
    known = shards | {folder / name for name in (*UNRECORDED, *checkpoint.provenance.files)}
    files = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    names = (path.relative_to(folder) for path in sorted(files - known))
    return [name.as_posix() for name in names if name.parts[0] not in BOOKKEEPING]


def _hash(ref: TensorRef, read: Callable[[TensorRef], Iterable[memoryview]] = read_chunks) -> str:
    digest = hashlib.sha256()
    for chunk in read(ref):
        digest.update(chunk)
    return digest.hexdigest()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
