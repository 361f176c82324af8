# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The inputs that fuzzing begins with: sound ones in sound/, and what long runs found to reach more code.

The latter are in one archive, found.zip, in a folder a target.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

SOUND = Path(__file__).parent / "sound"
FOUND = Path(__file__).parent / "found.zip"


def sound(target: str) -> list[bytes]:
    """Return the inputs of a target that were written by hand."""
    return [path.read_bytes() for path in sorted((SOUND / target).iterdir())]


def found() -> dict[str, bytes]:
    """Return the inputs that long runs have found, keyed by TARGET/NAME."""
    if not FOUND.exists():
        return {}
    with zipfile.ZipFile(FOUND) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def corpus(target: str) -> list[bytes]:
    """Return all inputs of a target."""
    return sound(target) + [data for name, data in found().items() if name.startswith(f"{target}/")]


def keep(target: str, folder: Path) -> None:
    """Replace the target's inputs in the archive by those in ``folder`` that are not among the sound ones."""
    ours = {name: data for name, data in found().items() if not name.startswith(f"{target}/")}
    known = set(sound(target))
    for path in folder.iterdir():
        if (data := path.read_bytes()) not in known:
            ours[f"{target}/{path.name}"] = data
    with zipfile.ZipFile(FOUND, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(ours):
            archive.writestr(zipfile.ZipInfo(name), ours[name], zipfile.ZIP_DEFLATED)
