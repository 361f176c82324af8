# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read and write ``flexquant_provenance.json``: a merged checkpoint's sources, tool versions and hashes.

The file holds no time and no absolute path, so the same sources give the same bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ValidationError

import flexquant
from flexquant.checkpoint.folder import confined_file, read_json, wrong_key
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.source import Source
from flexquant.documents.digest import hash_file
from flexquant.errors import FlexQuantError

PROVENANCE_FILE = "flexquant_provenance.json"
SCHEMA = "flexquant.provenance/v1"


class Provenance(BaseModel):
    """The keys of the document that are read; all are empty if the document has been removed."""

    sources: dict[str, JsonObject] = {}
    dtype: str | None = None
    """The dtype that what is in 16 bit was cast to; None: nothing was cast."""
    config_from: str | None = None
    """The source whose config was chosen; None: all had the same."""
    files: dict[str, str] = {}
    """Name of a file -> its SHA-256 in hexadecimal."""
    tensors: dict[str, str] = {}
    """Merged key -> SHA-256 of the tensor in hexadecimal."""


def read_provenance(folder: Path) -> Provenance:
    """Return a merged checkpoint's provenance; raise FlexQuantError for a malformed document."""
    if not (folder / PROVENANCE_FILE).exists():
        return Provenance()
    file = confined_file(folder, PROVENANCE_FILE)
    try:
        return Provenance.model_validate(read_json(file))
    except ValidationError as e:
        raise FlexQuantError(f"{file} has {wrong_key(e)}; fetch or merge the checkpoint again") from e


def make_provenance(
    sources: Sequence[Source],
    tensor_digests: Mapping[str, str],
    folder: Path,
    files: Iterable[str],
    dtype: str | None,
    config_from: str | None,
) -> JsonObject:
    """Return the provenance document; ``files`` in ``folder`` are hashed here.

    ``dtype`` is the one that what is in 16 bit was cast to; None: nothing was. ``config_from`` is the source
    whose config was chosen; None: all had the same.
    """
    return {
        "schema": SCHEMA,
        "versions": {
            "flexquant": flexquant.__version__,
            "python": platform.python_version(),
            "torch": version("torch"),
        },
        "sources": {
            s.name: {
                "folder": folder_label(s.folder),
                "config_sha256": hash_file(s.folder / "config.json"),
                "transformers_version": s.config.get("transformers_version"),
            }
            for s in sources
        },
        **({"dtype": dtype} if dtype else {}),
        **({"config_from": config_from} if config_from else {}),
        "files": {name: hash_file(folder / name) for name in sorted(files)},
        "tensors": dict(tensor_digests),
    }


def folder_label(folder: Path) -> str:
    """Return a folder's name, or ``org/model@revision`` for a folder in the Hugging Face hub's cache."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"
    return folder.name
