# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose the files beside the weights to copy, and check those that must be equal in all sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexquant.checkpoint.folder import confined_file, read_json
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError

GENERATION_CONFIG = "generation_config.json"
RECIPE = "recipe.yaml"

# Tokenizer, processor, chat template and remote code; a merged model can have only one of each.
IDENTICAL = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    "*.py",
)
NOTICES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
COPIED = (*IDENTICAL, *NOTICES, GENERATION_CONFIG)
"""Patterns of the files that a new checkpoint takes unchanged from the one that it is made from."""


def find_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the sorted names, relative to the folder, of the files that match."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def recipe_name(variant: str) -> str:
    """Return the name of a source's recipe in the merged checkpoint."""
    return f"recipe.{variant}.yaml"


def plan_sidecars(sources: Sequence[Source]) -> dict[str, Path]:
    """Return the files to copy: name in the merged checkpoint -> path.

    Raises FlexQuantError, naming the file, if the sources' tokenizers, chat templates, remote code or
    generation settings differ.
    """
    files: dict[str, Path] = {}
    for name in sorted({n for s in sources for n in find_files(s.folder, IDENTICAL)}):
        files[name] = _identical(name, sources)
    for source in sources:
        for name in find_files(source.folder, (GENERATION_CONFIG,)):
            path = confined_file(source.folder, name)
            if _generation_settings(files.setdefault(name, path)) != _generation_settings(path):
                raise FlexQuantError(
                    f"{path} differs from {files[name]}, but one checkpoint has one set of generation "
                    "defaults; make them equal"
                )
        for name in find_files(source.folder, NOTICES):
            files.setdefault(name, confined_file(source.folder, name))
        for name in find_files(source.folder, (RECIPE,)):
            files[recipe_name(source.name)] = confined_file(source.folder, name)
    return files


def _identical(name: str, sources: Sequence[Source]) -> Path:
    first = sources[0]
    for other in sources[1:]:
        if not all((s.folder / name).is_file() for s in (first, other)):
            has, lacks = (first, other) if (first.folder / name).is_file() else (other, first)
            raise FlexQuantError(
                f"'{has.name}' has {name} and '{lacks.name}' does not; variants of one model need the same "
                "tokenizer, chat template and code files"
            )
        a, b = confined_file(first.folder, name), confined_file(other.folder, name)
        same = read_json(a) == read_json(b) if name.endswith(".json") else a.read_bytes() == b.read_bytes()
        if not same:
            raise FlexQuantError(
                f"{name} of '{first.name}' and '{other.name}' differ ({a}, {b}); variants of one model need "
                "the same tokenizer, chat template and code files"
            )
    return confined_file(first.folder, name)


def _generation_settings(path: Path) -> JsonObject:
    return {k: v for k, v in read_json(path).items() if k != "transformers_version"}
