# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Processes side by side, each on its own cores."""

from __future__ import annotations

import os


def take_cores(number: int, processes: int) -> None:
    """Keep this process, one of several side by side, and what it starts to its share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number::processes] or cores)
