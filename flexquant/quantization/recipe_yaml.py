# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Recipe documents as plain data with the line of each key, and back to YAML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from flexquant.errors import FlexQuantError
from flexquant.policy_yaml import Document, KeyPath, from_yaml


class RecipeDocument(Document):
    """A document whose messages call its top level a recipe."""

    def place(self, path: KeyPath) -> str:
        return super().place(path) if path else f"{self.source}, line {self.lines.get(path, 1)}: the recipe"


def read_document(content: bytes, source: str) -> Document:
    """Parse YAML; raise FlexQuantError for bad syntax, duplicate keys and an empty file."""
    if not any(line.split(b"#")[0].strip(b" \t\r-") for line in content.split(b"\n")):
        raise FlexQuantError(f"{source} is empty; write the keys 'schema' and 'variants'")
    document = from_yaml(content, source)
    return RecipeDocument(document.data, document.source, document.lines)


def show(value: Any) -> str:
    """Return a value as it is written in a message: JSON, cut at 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_keys(
    value: Any, path: KeyPath, required: Sequence[str], optional: Sequence[str], document: Document
) -> None:
    """Raise FlexQuantError unless a value is a mapping with all required and no other than optional keys."""
    allowed = ", ".join([*required, *optional])
    if not isinstance(value, dict):
        document.fail(path, f"is {show(value)}; give a mapping with the keys {allowed}")
    for key in value:
        if key not in required and key not in optional:
            document.fail((*path, key), f"is an unknown key; the allowed ones here are {allowed}")
    for key in required:
        if key not in value:
            document.fail(path, f"lacks the key '{key}'; add it (allowed here: {allowed})")


def to_yaml(data: dict[str, Any]) -> str:
    """Return a document as YAML, keys in the given order, that :func:`read_document` reads back."""
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)


class _PlainDumper(yaml.SafeDumper):
    """Write equal lists twice instead of as an anchor and an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
