# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read files that come with FlexQuant by name, and a user's own files by path: policies, traces ..."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from flexquant.errors import FlexQuantError

YAML = (".yaml", ".yml")


def builtin_names(package: str, suffix: str = ".yaml") -> list[str]:
    """Return the sorted names of a package's files with this suffix."""
    files = importlib.resources.files(package).iterdir()
    return sorted(file.name.removesuffix(suffix) for file in files if file.name.endswith(suffix))


def read_named(
    name_or_path: str, package: str, kind: str, suffixes: tuple[str, ...] = YAML
) -> tuple[bytes, str]:
    """Return a file's content, and the name that messages give it.

    A built-in's name is a name. Other text is a path if it has a ``/``, ends in one of the ``suffixes``
    or names an existing file. Built-in files end in the first suffix. ``kind`` is the kind of file, e.g.
    policy. Raises FlexQuantError for an unknown name and a file that cannot be read.
    """
    builtins = builtin_names(package, suffixes[0])
    if name_or_path in builtins:
        file = importlib.resources.files(package) / f"{name_or_path}{suffixes[0]}"
        return file.read_bytes(), f"built-in {kind} {name_or_path}"
    path = Path(name_or_path).expanduser()
    known = ", ".join(builtins)
    if "/" not in name_or_path and path.suffix not in suffixes and not path.is_file():
        raise FlexQuantError(
            f"unknown {kind} '{name_or_path}': the built-in ones are {known}; give one of them, or the path "
            f"of a {kind} file (with a '/' or ending in {suffixes[0]})"
        )
    try:
        return path.read_bytes(), name_or_path
    except OSError as e:
        raise FlexQuantError(
            f"{name_or_path}: the {kind} file cannot be read ({e.strerror}); give the path of a file, or one "
            f"of the built-in ones {known}"
        ) from e
