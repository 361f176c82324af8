# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the folder of a model: a folder, or a Hugging Face id, which is fetched into the Hub's own cache."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from flexquant.checkpoint.folder import CARD, COPIED
from flexquant.documents.results import hash_file
from flexquant.errors import FlexQuantError

HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ("*.json", "*.safetensors", "*.yaml", CARD, *COPIED)
"""Patterns of the files that are fetched."""
NOT_NEEDED = ("consolidated*", *(f"*/{pattern}" for pattern in FILES if "/" not in pattern))
"""Patterns of files that hold the model once more: in Mistral's format, or in folders, into which FILES leads
since a ``*`` matches ``/`` too."""
SHA256 = re.compile(r"[0-9a-f]{64}")
CLOCK_TOLERANCE = 5.0
"""Seconds by which a file system's clock may differ from the machine's."""


def find_model(model: str | Path, files: Sequence[str] = FILES) -> Path:
    """Return the folder of a model: the folder of that name, else the cached snapshot of a Hugging Face id.

    An id is ``org/name`` or ``org/name@revision``. Only ``files`` that are not in the cache are fetched.
    ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HOME`` are those of Hugging Face's own tools.
    What is no id is returned as it is. Raises FlexQuantError for a name that no folder can have, if there is
    neither a folder nor a model, for a model that asks for a login, and for a file that arrived damaged.
    """
    found = HUB_ID.fullmatch(str(model))
    try:
        folder = Path(model).expanduser()
    except RuntimeError as e:  # the home of nobody
        raise FlexQuantError(
            f"{model} cannot be the name of a folder ({e}); give a folder, or a Hugging Face id such as "
            "org/name"
        ) from e
    if folder.exists() or not found:
        return folder
    started = time.time()
    snapshot = _fetch(found["id"], found["revision"], files)
    for file in snapshot.rglob("*"):
        if file.is_file() and file.resolve().stat().st_mtime > started - CLOCK_TOLERANCE:
            _check_arrived(file)
    return snapshot


def _fetch(model: str, revision: str | None, wanted: Sequence[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    advice = {
        errors.GatedRepoError: "ask for access on the model's page, and log in by 'hf auth login'",
        errors.RepositoryNotFoundError: "no folder and no public model has this name: give a folder that "
        "exists, or log in by 'hf auth login' for a private model",
        errors.RevisionNotFoundError: "after the @, give one of the model's branches, tags or commits",
        errors.LocalEntryNotFoundError: "no folder has this name, and it is not in the cache: give a folder "
        "that exists, or try again when the Hub can be reached",
        errors.HFValidationError: "no folder has this name, and no model can have it: give a folder that "
        "exists",
    }
    try:
        files, others = list(wanted), list(NOT_NEEDED)
        return Path(snapshot_download(model, revision=revision, allow_patterns=files, ignore_patterns=others))
    except (OSError, ValueError, errors.HfHubHTTPError) as e:
        kinds = [said for kind, said in advice.items() if isinstance(e, kind)]
        said = kinds[0] if kinds else "try again: what has arrived is kept"
        name = f"{model}@{revision}" if revision else model
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise FlexQuantError(f"{name} cannot be fetched from the Hugging Face Hub ({reason}); {said}") from e


def _check_arrived(file: Path) -> None:
    """Raise FlexQuantError for a file of the cache whose SHA-256 is not the Hub's, and delete it."""
    blob = file.resolve()
    if SHA256.fullmatch(blob.name) and hash_file(blob) != blob.name:
        blob.unlink()
        file.unlink()
        raise FlexQuantError(
            f"{file.name} arrived damaged (its SHA-256 is not the Hub's) and was deleted from the cache; "
            "try again"
        )
