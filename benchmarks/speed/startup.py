# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a started server tells: vLLM's /metrics about its KV cache, FlexQuant's log about its weights."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

CACHE = "vllm:cache_config_info"
FLEXQUANT = re.compile(r"FlexQuant \S+: (policy .*)")
VARIANT_SIZE = re.compile(r"([\w-]+)(?: layers [\d-]+| outside layers)?: ([\d.]+) (bytes|KiB|MiB|GiB)")
GIB = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}


def read_metrics(url: str) -> str:
    """Return the Prometheus metrics of the server at ``url``; raise URLError if there are none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return reply.read().decode()


def kv_cache_size(metrics: str) -> dict[str, int]:
    """Return the blocks of the KV cache, their size and the tokens in all; nothing if the server tells none.

    From 0.32 on vLLM tells the tokens itself: as many as the most requests of the greatest length have, each
    in whole blocks. Before, all blocks count.
    """
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == CACHE:
                told = {name: int(text) for name, text in sample.labels.items() if text.isdigit()}
                if {"num_gpu_blocks", "block_size"} <= told.keys():
                    blocks, size = told["num_gpu_blocks"], told["block_size"]
                    tokens = told.get("kv_cache_size_tokens", blocks * size)
                    return {"kv_cache_blocks": blocks, "kv_cache_block_size": size, "kv_cache_tokens": tokens}
    return {}


def announcement(log: str) -> dict[str, Any]:
    """Return what FlexQuant says of itself when it has loaded, and the GiB of each variant's weights."""
    match = FLEXQUANT.search(log)
    if match is None:
        return {}
    sizes: Counter[str] = Counter()
    for name, size, unit in VARIANT_SIZE.findall(match[1].partition("; weights ")[2]):
        sizes[name] += float(size) * GIB[unit]
    return {"flexquant": match[1].strip(), "variant_gib": dict(sizes)}
