# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""YAML files that come with FlexQuant, used by name, and a user's own, used by path: policies and recipes."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from flexquant.errors import FlexQuantError


def builtin_names(package: str) -> list[str]:
    """Return the names of the YAML files in a package, sorted."""
    files = importlib.resources.files(package).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_named(name_or_path: str, package: str, kind: str) -> tuple[bytes, str]:
    """Return a file's content, and what messages call it.

    Anything with a ``/``, ending in ``.yaml`` or ``.yml``, or naming an existing file that is not a
    built-in's name is a path. ``kind`` is what such a file is called: policy, recipe. Raises FlexQuantError
    for an unknown name and a file that cannot be read.
    """
    builtins = builtin_names(package)
    if name_or_path in builtins:
        file = importlib.resources.files(package) / f"{name_or_path}.yaml"
        return file.read_bytes(), f"built-in {kind} {name_or_path}"
    path = Path(name_or_path).expanduser()
    known = ", ".join(builtins)
    if "/" not in name_or_path and path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise FlexQuantError(
            f"unknown {kind} '{name_or_path}': the built-in ones are {known}; give one of them, or the path "
            f"of a {kind} file (with a '/' or ending in .yaml)"
        )
    try:
        return path.read_bytes(), name_or_path
    except OSError as e:
        raise FlexQuantError(
            f"{name_or_path}: the {kind} file cannot be read ({e.strerror}); give the path of a file, or one "
            f"of the built-in ones {known}"
        ) from e
