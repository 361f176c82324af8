# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The memory of a running server over time, each of vLLM's processes apart."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import psutil

SAMPLE_SECONDS = 2.0
TITLES = {"VLLM::EngineCore": "engine_core", "VLLM::Worker": "worker"}
"""vLLM's names of its processes -> the names here; the first process is the ``api_server``."""


class MemoryOverTime(threading.Thread):
    """Samples the resident memory of a server's processes until it is stopped.

    Pages that processes share, as those of libraries and of weights mapped from a file, count in each.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._server = psutil.Process(pid)
        self._ended = threading.Event()
        self._samples: list[tuple[float, dict[str, float]]] = []

    def run(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(SAMPLE_SECONDS):
            self._samples.append((time.monotonic() - began, self._resident()))

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def told(self) -> dict[str, Any]:
        """Return for every process, and for all together, the MiB at first, at last and at every minute."""
        seconds = np.array([moment for moment, _ in self._samples])
        found: dict[str, Any] = {"seconds": float(seconds[-1])}
        for name in sorted({name for _, resident in self._samples for name in resident}):
            mib = np.array([resident.get(name, 0.0) for _, resident in self._samples])
            found[name] = {
                "first_mib": float(mib[0]),
                "last_mib": float(mib[-1]),
                "mib_by_minute": [round(float(mib[i]), 1) for i in each_minute(seconds)],
            }
        return found

    def _resident(self) -> dict[str, float]:
        """Return the MiB of each process, and of all together."""
        found: defaultdict[str, float] = defaultdict(float)
        for process in [self._server, *self._server.children(recursive=True)]:
            try:
                title, resident = " ".join(process.cmdline()), process.memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue
            name = next((name for start, name in TITLES.items() if title.startswith(start)), "other")
            found["api_server" if process is self._server else name] += resident
            found["all"] += resident
        return dict(found)


def each_minute(seconds: np.ndarray) -> list[int]:
    """Return the indices of the moments, in rising order, that are the first of their minute."""
    return [int(i) for i in np.unique(seconds // 60, return_index=True)[1]]
