# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Name the files beside a checkpoint's weights by what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexquant.checkpoint.folder import confined_file

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
