# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the folder of a model, and read it without trusting it: JSON files, tensors, the files beside them.

Every file has to lie inside the folder after links are followed, or in ``../../blobs/`` of the Hub's cache.
"""

import json
import math
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from flexquant.checkpoint.model_config import SECTIONS, JsonObject, with_section
from flexquant.checkpoint.safetensors_io import MAX_HEADER_BYTES, TensorRef, read_header
from flexquant.documents import parse_json
from flexquant.documents.results import hash_file
from flexquant.errors import FlexQuantError, said_by

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARDS = "*.safetensors"
NUMBERED = re.compile(r"-of-(\d+)\.safetensors$")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NAME_SHOWN = 80

A_FOLDER = "a folder, or a Hugging Face id such as org/name"
UNBOUNDED = "time_step_limit"
"""Key of a state-space model's config in which transformers writes Infinity."""
GENERATION_CONFIG = "generation_config.json"
RECIPE = "recipe.yaml"
CARD = "README.md"

MISTRAL_TOKENIZER = ("tekken.json", "*.model.v*")
CHAT_TEMPLATES = ("chat_template*", "additional_chat_templates/*")
ADDED_TOKENS = ("added_tokens.json", "special_tokens_map.json")
VOCABULARY = ("vocab.*", "merges.txt", "*.model", "*.tiktoken", *ADDED_TOKENS)
TOKENIZER = ("tokenizer*", *VOCABULARY, *MISTRAL_TOKENIZER, *CHAT_TEMPLATES)
PROCESSOR = ("*processor_config.json",)
CODE = ("*.py",)
NOTICES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
COPIED = (*TOKENIZER, *PROCESSOR, *CODE, *NOTICES, GENERATION_CONFIG)
"""Patterns of the files that a new checkpoint takes unchanged from the one that it is made from."""

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

    An id is ``org/name`` or ``org/name@revision``; of its files, those of ``files`` that the cache lacks are
    fetched. What is no id is returned as it is. Raises FlexQuantError for a name that no folder can have, a
    model that cannot be fetched, and a file that arrived damaged.
    """
    found = HUB_ID.fullmatch(str(model))
    try:
        folder = Path(model).expanduser()
    except RuntimeError as e:  # the home of nobody
        raise FlexQuantError(f"{model} cannot be the name of a folder ({e}); give {A_FOLDER}") from e
    if folder.exists() or not found:
        return folder
    started = time.time()
    snapshot = _fetch(found["id"], found["revision"], files)
    for file in snapshot.rglob("*"):
        if file.is_file() and file.resolve().stat().st_mtime > started - CLOCK_TOLERANCE:
            _check_arrived(file)
    return snapshot


def _fetch(model: str, revision: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    unnamed = "no folder has this name, and"
    advice = {
        errors.GatedRepoError: "ask for access on the model's page, and log in by 'hf auth login'",
        errors.RepositoryNotFoundError: "no folder and no public model has this name: give a folder that "
        "exists, or log in by 'hf auth login' for a private model",
        errors.RevisionNotFoundError: "after the @, give one of the model's branches, tags or commits",
        errors.LocalEntryNotFoundError: f"{unnamed} it is not in the cache: give a folder that exists, or "
        "try again when the Hub can be reached",
        errors.HFValidationError: f"{unnamed} no model can have it: give a folder that exists",
    }
    wanted, others = list(files), list(NOT_NEEDED)
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=others)
        return Path(found)
    except (OSError, ValueError, errors.HfHubHTTPError) as e:
        kept = "try again: what has arrived is kept"
        todo = next((todo for kind, todo in advice.items() if isinstance(e, kind)), kept)
        named = f"{model}@{revision}" if revision else model
        problem = f"{named} cannot be fetched from the Hugging Face Hub ({said_by(e)})"
        raise FlexQuantError(f"{problem}; {todo}") from e


def _check_arrived(file: Path) -> None:
    """Raise FlexQuantError for a file of the cache whose SHA-256 is not the Hub's, and delete it."""
    blob = file.resolve()
    if SHA256.fullmatch(blob.name) and hash_file(blob) != blob.name:
        blob.unlink()
        file.unlink()
        problem = f"{file.name} arrived damaged (its SHA-256 is not the Hub's) and was deleted from the cache"
        raise FlexQuantError(f"{problem}; try again")


def check_folder(folder: Path) -> None:
    if not folder.exists():
        raise FlexQuantError(f"no such folder: {folder}; give {A_FOLDER}")
    if not folder.is_dir():
        raise FlexQuantError(f"{folder} is not a folder; give the folder that holds config.json")


def confined_file(folder: Path, name: str) -> Path:
    """Return the path of a plain file in ``folder``; raise FlexQuantError for anything else."""
    path = folder / name
    try:
        target, root = path.resolve(), folder.resolve()
        is_file = target.is_file()
    except PermissionError:
        raise
    except (ValueError, OSError, RuntimeError) as e:  # a zero byte, too long, links in a circle ...
        problem = f"{name[:NAME_SHOWN]!r} cannot be the name of a file in {folder}"
        raise FlexQuantError(f"{problem}; write the checkpoint again") from e
    is_cached = root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")
    is_inside = target.is_relative_to(root) or is_cached
    if Path(name).is_absolute() or ".." in Path(name).parts or not is_inside:
        raise FlexQuantError(f"'{name}' leads outside the checkpoint folder {folder}; copy it there")
    if not is_file:
        raise FlexQuantError(f"{folder} has no file '{name}'; download or write the checkpoint again")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise FlexQuantError(f"{path} is a git-lfs pointer to the file; fetch it with 'git lfs pull'")
    return path


def read_json(path: Path) -> JsonObject:
    """Return the JSON object in a file; raise FlexQuantError for anything else, and for NaN in it."""
    try:
        if (size := path.stat().st_size) > MAX_HEADER_BYTES:
            found = f"{path} has {size} bytes, and {MAX_HEADER_BYTES} are allowed"
            raise FlexQuantError(f"{found}; write it again")
        text = path.read_text(encoding="utf-8")
        content = parse_json(text)
        check_finite(content)
        if "\\ud" in text.lower():  # raises ValueError for a lone surrogate
            json.dumps(content, ensure_ascii=False).encode()
    except OSError as e:
        raise FlexQuantError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise FlexQuantError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(content, dict):
        raise FlexQuantError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def read_if_there(folder: Path, name: str) -> JsonObject | None:
    """Return the JSON object in the file ``name`` of a folder; None if there is no such file."""
    return read_json(confined_file(folder, name)) if (folder / name).exists() else None


def read_config(folder: Path) -> JsonObject:
    """Return a checkpoint's ``config.json``, with how it is quantised wherever that is written."""
    check_folder(folder)
    file = confined_file(folder, "config.json")
    return with_section(read_json(file), str(file), partial(read_if_there, folder))


def read_16_bit_config(folder: Path) -> JsonObject:
    """Return the ``config.json`` of a model in 16 bit; raise FlexQuantError if it is missing or quantised."""
    config = read_config(folder)
    if (section := config.get(SECTIONS[0])) is not None:
        method = section.get("quant_method")
        raise FlexQuantError(f"{folder} is quantised already ({method}); start from the 16-bit model")
    return config


def wrong_key(error: ValidationError) -> str:
    """Describe the first problem of a JSON object: ``a wrong 'variants.w8a8.prefix' (Field required)``."""
    first = error.errors()[0]
    problem = first["msg"].replace(" tuple", " list")  # JSON has lists, which are read as tuples
    return f"a wrong '{'.'.join(map(str, first['loc']))}' ({problem})"


def read_tensors(folder: Path) -> dict[str, TensorRef]:
    """Return every tensor of the checkpoint, by name, from its index's shards or, without one, all files.

    Raises FlexQuantError for a corrupt, missing or outside shard, and a tensor not in exactly one place.
    """
    weight_map = _read_index(folder) if (folder / INDEX_FILE).exists() else None
    shards = _shards_without_index(folder) if weight_map is None else sorted(set(weight_map.values()))
    tensors: dict[str, TensorRef] = {}
    for shard in shards:
        for name, ref in read_header(confined_file(folder, shard)).items():
            if weight_map is None and name in tensors:
                both = f"in {tensors[name].file.name} and in {shard}"
                raise FlexQuantError(f"{folder} has '{name}' {both}; keep one of the files")
            if weight_map is not None and weight_map.get(name) != shard:
                stated = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                problem = f"{folder / shard} holds tensor '{name}', which {INDEX_FILE} lists {stated}"
                raise FlexQuantError(f"{problem}; write the checkpoint again")
            tensors[name] = ref
    for name, shard in (weight_map or {}).items():
        if name not in tensors:
            problem = f"{folder / INDEX_FILE} lists tensor '{name}' in {shard}, which does not hold it"
            raise FlexQuantError(f"{problem}; write the checkpoint again")
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    index = confined_file(folder, INDEX_FILE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FlexQuantError(f"{index} has no weight_map from tensors to files; write the checkpoint again")
    return weight_map


def _shards_without_index(folder: Path) -> list[str]:
    """Return a folder's safetensors files, whatever they are called; Mistral's hold the model once more."""
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    names = sorted(path.name for path in folder.glob(SHARDS) if not path.name.startswith("consolidated"))
    if not names:
        problem = f"{folder} has no safetensors file, and weights in .bin files are not read"
        advice = "save them with transformers' save_pretrained, or give a checkpoint folder"
        raise FlexQuantError(f"{problem}; {advice}")
    for name in names:
        if (numbered := NUMBERED.search(name)) and len(names) != (count := int(numbered[1])):
            raise FlexQuantError(f"{folder} has {len(names)} of {count} files such as {name}; fetch it again")
    return names


def check_finite(content: object, key: str = "") -> None:
    """Raise ValueError for NaN and infinite numbers, which JSON lacks; UNBOUNDED may hold Infinity."""
    if isinstance(content, dict):
        for name, value in content.items():
            check_finite(value, name)
    elif isinstance(content, list):
        for value in content:
            check_finite(value, key)
    elif content == math.inf and key == UNBOUNDED:
        return
    elif isinstance(content, float) and not math.isfinite(content):
        raise ValueError(f"{json.dumps(content)} is no number in JSON")


def find_files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files that match, sorted: name in the folder -> path; raise as :func:`confined_file`."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if not path.is_dir()}
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    return {name: confined_file(folder, name) for name in names}


def recipe_name(variant: str) -> str:
    """Return the name of a source's recipe in the merged checkpoint."""
    return f"recipe.{variant}.yaml"
