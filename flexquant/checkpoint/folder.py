# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a checkpoint folder without trusting it: its JSON files, its tensors by name, the files beside them.

Every file has to lie inside the folder after links are followed. The one exception is the Hugging Face hub's
cache, whose snapshot folders hold links to ``../../blobs/`` of the same repository folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject, stored_section
from flexquant.checkpoint.safetensors_io import TensorRef, read_header
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from pydantic import ValidationError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARDS = "*.safetensors"
NUMBERED = re.compile(r"-of-(\d+)\.safetensors$")
"""Matches the number of shards in the name of one of them."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NAME_SHOWN = 80
"""Characters of an invalid file name that a message shows."""

UNBOUNDED = "time_step_limit"
"""Key of a state-space model's config in which transformers writes Infinity."""
GENERATION_CONFIG = "generation_config.json"
RECIPE = "recipe.yaml"
CARD = "README.md"

MISTRAL_TOKENIZER = ("tekken.json", "*.model.v*")
"""Files that mistral-common reads."""
CHAT_TEMPLATES = ("chat_template*", "additional_chat_templates/*")
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    *MISTRAL_TOKENIZER,
    *CHAT_TEMPLATES,
)
PROCESSOR = ("*processor_config.json",)
CODE = ("*.py",)
NOTICES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
COPIED = (*TOKENIZER, *PROCESSOR, *CODE, *NOTICES, GENERATION_CONFIG)
"""Patterns of the files that a new checkpoint takes unchanged from the one that it is made from."""


def check_folder(folder: Path) -> None:
    """Raise FlexQuantError unless ``folder`` is a folder."""
    if not folder.exists():
        raise FlexQuantError(f"no such folder: {folder}; give one, or a Hugging Face id such as org/name")
    if not folder.is_dir():
        raise FlexQuantError(f"{folder} is not a folder; give the folder that holds config.json")


def confined_file(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` in ``folder``.

    Raises FlexQuantError if it is missing, is not a plain file, lies outside the folder, or is a git-lfs
    pointer.
    """
    path = folder / name
    try:
        target, root = path.resolve(), folder.resolve()
        is_file = target.is_file()
    except PermissionError:
        raise
    except (ValueError, OSError, RuntimeError) as e:  # a zero byte, too long, links in a circle ...
        raise FlexQuantError(
            f"{name[:NAME_SHOWN]!r} cannot be the name of a file in {folder}; write the checkpoint again"
        ) from e
    if Path(name).is_absolute() or ".." in Path(name).parts or not _may_link(root, target):
        raise FlexQuantError(
            f"'{name}' leads outside the checkpoint folder {folder}; copy the file into the folder"
        )
    if not is_file:
        raise FlexQuantError(f"{folder} has no file '{name}'; download or write the checkpoint again")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise FlexQuantError(f"{path} is a git-lfs pointer to the file; fetch it with 'git lfs pull'")
    return path


def read_json(path: Path) -> JsonObject:
    """Return the JSON object in a file; raise FlexQuantError for anything else, and for NaN in it."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        check_finite(content)
        if "\\ud" in text.lower():  # raises ValueError for a lone surrogate
            json.dumps(content, ensure_ascii=False).encode()
    except OSError as e:
        raise FlexQuantError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise FlexQuantError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(content, dict):
        raise FlexQuantError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def quantization_section(folder: Path, config: JsonObject) -> JsonObject | None:
    """Return how the checkpoint in a folder says that it is quantised, as :func:`stored_section` does."""

    def read(name: str) -> JsonObject | None:
        return read_json(confined_file(folder, name)) if (folder / name).exists() else None

    return stored_section(config, str(folder / "config.json"), read)


def read_16_bit_config(folder: Path) -> JsonObject:
    """Return the ``config.json`` of a model in 16 bit; raise FlexQuantError if it is missing or quantised."""
    check_folder(folder)
    config = read_json(confined_file(folder, "config.json"))
    section = quantization_section(folder, config)
    if section is not None:
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

    Raises FlexQuantError for a corrupt or missing shard, a shard outside the folder, an index that disagrees
    with its shards, and a tensor that two files hold.
    """
    if not (folder / INDEX_FILE).exists():
        return _without_index(folder)

    index = confined_file(folder, INDEX_FILE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FlexQuantError(
            f"{index} has no weight_map from tensor names to files; write the checkpoint again"
        )
    tensors: dict[str, TensorRef] = {}
    for shard in sorted(set(weight_map.values())):
        for name, ref in read_header(confined_file(folder, shard)).items():
            if weight_map.get(name) != shard:
                stated = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise FlexQuantError(
                    f"{folder / shard} holds tensor '{name}', which {INDEX_FILE} lists {stated}; "
                    "write the checkpoint again"
                )
            tensors[name] = ref
    for name, shard in weight_map.items():
        if name not in tensors:
            raise FlexQuantError(
                f"{index} lists tensor '{name}' in {shard}, which does not hold it; "
                "write the checkpoint again"
            )
    return tensors


def _without_index(folder: Path) -> dict[str, TensorRef]:
    """Return the tensors of a folder's safetensors files, whatever they are called."""
    names = [SINGLE_FILE] if (folder / SINGLE_FILE).exists() else _shards(folder)
    if not names:
        raise FlexQuantError(f"{folder} has no safetensors file; is it a checkpoint folder?")
    tensors: dict[str, TensorRef] = {}
    for name in names:
        if (numbered := NUMBERED.search(name)) and len(names) != int(numbered[1]):
            count = int(numbered[1])
            raise FlexQuantError(f"{folder} has {len(names)} of {count} files such as {name}; fetch it again")
        for key, ref in read_header(confined_file(folder, name)).items():
            if key in tensors:
                raise FlexQuantError(
                    f"{folder} has '{key}' in {tensors[key].file.name} and in {name}; keep one of the files"
                )
            tensors[key] = ref
    return tensors


def _shards(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors files but for Mistral's, which hold the model once more."""
    return sorted(path.name for path in folder.glob(SHARDS) if not path.name.startswith("consolidated"))


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


def _may_link(root: Path, target: Path) -> bool:
    if target.is_relative_to(root):
        return True
    repository = root.parent.parent
    in_hub_cache = root.parent.name == "snapshots" and repository.name.startswith("models--")
    return in_hub_cache and target.is_relative_to(repository / "blobs")


def find_files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files that match, sorted: name relative to the folder -> path.

    Raises FlexQuantError as :func:`confined_file` does: what matches may be read, copied and published.
    """
    found = {path for pattern in patterns for path in folder.glob(pattern) if not path.is_dir()}
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    return {name: confined_file(folder, name) for name in names}


def recipe_name(variant: str) -> str:
    """Return the name of a source's recipe in the merged checkpoint."""
    return f"recipe.{variant}.yaml"
