# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a starting vLLM server says of its memory, its kernels and the time it took (vLLM 0.26 to 0.32)."""

from __future__ import annotations

import re
from typing import Any

NUMBERS = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "kv_cache_gib": r"Available KV cache memory: ([\d.]+) GiB|Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV",
    "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
    "graph_gib": r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB",
    "graph_seconds": r"Graph capturing finished in (\d+) secs",
    "load_seconds": r"Loading weights took ([\d.]+) seconds",
    "engine_seconds": r"init engine \([^)]*\) took ([\d.]+) s",
    "compile_seconds": r"init engine .*\(compilation: ([\d.]+) s",
}
KERNEL = re.compile(r"(?:Using|Selected) (\w+Kernel) for (?!mixed-precision)")
FLEXQUANT = re.compile(r"FlexQuant \S+: (policy .*)")
VARIANT_SIZE = re.compile(r"(\S+) ([\d.]+) MiB")


def parse_startup_log(text: str) -> dict[str, Any]:
    """Return the numbers that were found (GiB, seconds, tokens), and the names of the kernels in order.

    For FlexQuant also what it announces of itself, and the GiB of each variant's weights as loaded. vLLM logs
    no ``weights_gib`` on a CPU.
    """
    found: dict[str, Any] = {}
    for name, pattern in NUMBERS.items():
        if match := re.search(pattern, text):
            number = next(group for group in match.groups() if group is not None).replace(",", "")
            found[name] = int(number) if name == "kv_cache_tokens" else float(number)
    found["kernels"] = list(dict.fromkeys(KERNEL.findall(text)))
    if match := FLEXQUANT.search(text):
        found["flexquant"] = match[1].strip()
        sizes = VARIANT_SIZE.findall(match[1].partition("; weights ")[2])
        found["variant_gib"] = {name: float(size) / 1024 for name, size in sizes}
    return found
