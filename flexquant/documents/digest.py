# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Tell what a result was made from, and whether another run has the same: digests, versions, differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from flexquant.errors import FlexQuantError, UsageError

Content = TypeVar("Content")


def digest_of(document: object, sort_keys: bool = True) -> str:
    """Return the SHA-256 of JSON-able data, in hexadecimal; unsorted, the order of keys counts too."""
    return hashlib.sha256(json.dumps(document, sort_keys=sort_keys).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def different_keys(wanted: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Return the keys that have other values in ``found``, or are missing in one of the two."""
    return [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]


def read_earlier(
    file: Path,
    inputs: Mapping[str, object],
    read: Callable[[str], tuple[Mapping[str, object], Content]],
    *,
    foreign: str,
    other: str,
    error: type[FlexQuantError] = UsageError,
) -> Content | None:
    """Return what an earlier run with the same ``inputs`` left in ``file``; None if there is no such file.

    ``read`` returns the inputs that the file's text records, and the content. Raises ``error``: with the
    message ``<file> <foreign>`` for a file that ``read`` cannot read, ``{}`` being the reason, and with
    ``<file> <other>`` for one with other inputs, ``{}`` being their names.
    """
    try:
        recorded, content = read(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise error(f"{file} {foreign.format(repr(e))}") from e
    if different := different_keys(inputs, recorded):
        raise error(f"{file} {other.format(', '.join(different))}")
    return content
