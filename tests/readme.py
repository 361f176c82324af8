# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands and documents that the pages show, for the tests that run them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_FLEXQUANT = (f"flexquant/{room}" for room in ("quantization", "evaluation", "tuning"))
PAGES = [ROOT / room / "README.md" for room in ("", "merge", "policies", *OF_FLEXQUANT, "benchmarks")]
"""Pages in an order in which their commands find what earlier ones wrote."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return [body for found, body in BLOCK.findall(text) if found == language]


def commands() -> list[str]:
    """Return each command line of the ``bash`` blocks once, without comments and with broken lines joined."""
    lines = [line.strip() for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


def documents(schema: str) -> list[str]:
    """Return the pages' YAML documents of a schema, in order."""
    return [block for block in blocks("yaml") if f"schema: {schema}\n" in block]
