# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands and documents that README.md shows, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(README.read_text()) if found == language]


def commands() -> list[str]:
    """Every command line of the README's ``bash`` blocks, comments left out."""
    lines = [line.strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def document(schema: str) -> str:
    """The README's YAML document of a schema."""
    (found,) = [block for block in blocks("yaml") if f"schema: {schema}\n" in block]
    return found
