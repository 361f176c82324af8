# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The description of a run that every result of a benchmark begins with."""

from __future__ import annotations

from typing import Any

from benchmarks.speed.results import git_commit
from flexquant.measuring.machine import describe_command, describe_machine, describe_versions


def origin(module: str) -> dict[str, Any]:
    """Return the command line of ``python -m module``, and its commit, machine and versions."""
    return {
        "argv": ["python", "-m", module, *describe_command()[1:]],
        "commit": git_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
