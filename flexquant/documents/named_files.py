# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Files that come with FlexQuant, used by name, and a user's own, used by path: policies, traces ..."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from flexquant.errors import FlexQuantError

YAML = (".yaml", ".yml")


def builtin_names(package: str, suffix: str = ".yaml") -> list[str]:
    """Return the names of the files with a suffix in a package, sorted."""
    files = importlib.resources.files(package).iterdir()
    return sorted(file.name.removesuffix(suffix) for file in files if file.name.endswith(suffix))


def read_named(
    name_or_path: str, package: str, kind: str, suffixes: tuple[str, ...] = YAML
) -> tuple[bytes, str]:
    """Return a file's content, and what messages call it.

    Anything with a ``/``, ending in one of the ``suffixes``, or naming an existing file that is not a
    built-in's name is a path; built-in files end in the first of them. ``kind`` is what such a file is
    called: policy, recipe. Raises FlexQuantError for an unknown name and a file that cannot be read.
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
