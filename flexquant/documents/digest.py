# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Tell what a result was made from, and whether another run has the same: digests, versions, differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


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
