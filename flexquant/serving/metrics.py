# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Passes, tokens and seconds of every plan and phase, on the ``/metrics`` of vLLM's API server.

They are counted in a worker, where no pass is missed, also if vLLM replays it from a FULL graph. That is a
process of its own, so it counts in files of prometheus_client's multiprocess mode, which hold the values in
shared memory, and whoever answers ``/metrics`` reads them there: with one API server a collector beside
vLLM's own metrics, with several vLLM itself, which then keeps its own metrics in such files too. Of the
workers of an engine one counts, since all take the same passes.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import tempfile
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString
from vllm.config import CUDAGraphMode

from flexquant.serving.forward_pass import Pass
from flexquant.serving.metric_names import (
    FORWARD,
    HELP,
    PADDED_TOKENS,
    POLICY,
    REPLAYS,
    SECONDS,
    SIZE,
    SIZE_BUCKETS,
    TOKENS,
    WEIGHT_BYTES,
)
from flexquant.serving.pass_times import PassTimer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FOLDER = "FLEXQUANT_METRICS_DIR"
"""Environment variable with the folder of the files: set in the front end, inherited by the workers."""
OF_SEVERAL_SERVERS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own; vLLM sets it where it starts several API servers."""

_own_folder: tempfile.TemporaryDirectory[str] | None = None
_collector: MultiProcessCollector | None = None


def offer_metrics() -> None:
    """In the front end: have the counters of the workers that it will start on its ``/metrics``.

    An API server that vLLM's front end starts as a child shares the folder that the front end made. A program
    of its own makes its own, whatever it inherits from who started it.
    """
    global _own_folder, _collector
    if OF_SEVERAL_SERVERS in os.environ:
        os.environ[FOLDER] = os.environ[OF_SEVERAL_SERVERS]
    elif _collector is None:
        if multiprocessing.parent_process() is None or FOLDER not in os.environ:
            _own_folder = tempfile.TemporaryDirectory(prefix="flexquant-metrics-")
            os.environ[FOLDER] = _own_folder.name
        _collector = MultiProcessCollector(REGISTRY, os.environ[FOLDER])


def metrics_of_worker(vllm_config: VllmConfig) -> PassMetrics | None:
    """Return what this worker counts in; None if another counts for its engine, or nobody could read it.

    The first rank of the last pipeline stage counts: it alone computes logits, with which a pass ends.
    """
    parallel = vllm_config.parallel_config
    folder = Path(os.environ.get(FOLDER, ""))
    if parallel.rank != parallel.world_size - parallel.tensor_parallel_size or not folder.is_absolute():
        return None
    if not folder.is_dir():
        return None
    labels = (
        ("model_name", str(vllm_config.model_config.served_model_name)),
        ("engine", str(parallel.data_parallel_index)),
    )
    return PassMetrics(folder, labels, torch.device(vllm_config.device_config.device_type))


Labels = tuple[tuple[str, str], ...]
"""Names and values."""
SIZE_ENDS = [floatToGoString(end) for end in (*SIZE_BUCKETS, float("inf"))]


class PassMetrics:
    """The counters of one engine, in shared memory."""

    def __init__(self, folder: Path, labels: Labels, device: torch.device) -> None:
        """``labels`` are those of every metric; ``device`` runs the passes."""
        self._labels = labels
        self._counters = MmapedDict(str(folder / f"counter_flexquant{os.getpid()}.db"))
        self._sizes = MmapedDict(str(folder / f"histogram_flexquant{os.getpid()}.db"))
        # Of several engines that tell the same the largest value is shown.
        self._gauges = MmapedDict(str(folder / f"gauge_max_flexquant{os.getpid()}.db"))
        self._key = functools.cache(self._make_key)
        self._buckets = functools.cache(self._make_buckets)
        self._timer = PassTimer(device, self._add_seconds)
        self._last: Labels = ()
        """Plan and phase of the pass that was counted last."""
        self._policy: Labels | None = None

    def announce_weights(self, nbytes: dict[str, int]) -> None:
        """Tell the bytes of weights by variant."""
        for variant, size in nbytes.items():
            self._set(WEIGHT_BYTES, size, ("variant", variant))

    def announce_policy(self, name: str, digest: str) -> None:
        """Tell which policy routes from now on; ``digest`` is its document's."""
        if self._policy is not None:
            self._set(POLICY, 0, *self._policy)
        self._policy = (("policy", name), ("digest", digest))
        self._set(POLICY, 1, *self._policy)

    def begin_pass(self) -> None:
        """A pass begins, of which more is known when it is counted."""
        self._timer.begin()

    def count_pass(self, forward_pass: Pass, plan: str, graph: CUDAGraphMode) -> None:
        """Count a pass; ``graph``: the mode of the CUDA graphs that it runs from."""
        self._last = labels = (("plan", plan), ("phase", forward_pass.phase))
        self._add(FORWARD, 1, *labels)
        self._add(TOKENS, forward_pass.scheduled_tokens, *labels)
        self._add(PADDED_TOKENS, forward_pass.tokens, *labels)
        self._observe_size(forward_pass, labels)
        if graph != CUDAGraphMode.NONE:
            self._add(REPLAYS, 1, *labels, ("mode", graph.name))

    def end_pass(self) -> None:
        """The pass that was counted last has ended."""
        self._timer.end(self._last)

    def counted(self) -> list[dict[str, str | float]]:
        """Return a record for each plan and phase that has run: the counters by their names."""
        cells: dict[tuple[str, str], dict[str, str | float]] = {}
        for key, value, _ in self._counters.read_all_values():
            metric, _, labels, _ = json.loads(key)
            if all(labels[name] == own for name, own in self._labels):
                where = labels["plan"], labels["phase"]
                cell = cells.setdefault(where, {"plan": where[0], "phase": where[1]})
                name = metric.removeprefix("flexquant:") + (f"_{labels['mode']}" if "mode" in labels else "")
                cell[name] = value
        return list(cells.values())

    def _add_seconds(self, labels: Labels, seconds: float) -> None:
        self._add(SECONDS, seconds, *labels)

    def _observe_size(self, forward_pass: Pass, labels: Labels) -> None:
        decodes = forward_pass.phase == "decode"
        size = forward_pass.sequences if decodes else forward_pass.scheduled_tokens
        add_to(self._sizes, self._buckets(labels)[bisect_left(SIZE_BUCKETS, size)], 1)
        add_to(self._sizes, self._key(SIZE, f"{SIZE}_sum", labels), size)

    def _make_buckets(self, labels: Labels) -> list[str]:
        keys = [self._make_key(SIZE, f"{SIZE}_bucket", (*labels, ("le", end))) for end in SIZE_ENDS]
        for key in keys:
            add_to(self._sizes, key, 0)
        return keys

    def _add(self, metric: str, amount: float, *labels: tuple[str, str]) -> None:
        add_to(self._counters, self._key(metric, f"{metric}_total", labels), amount)

    def _set(self, metric: str, value: float, *labels: tuple[str, str]) -> None:
        self._gauges.write_value(self._key(metric, metric, labels), float(value), 0.0)

    def _make_key(self, metric: str, sample: str, labels: Labels) -> str:
        named = dict(self._labels + labels)
        return mmap_key(metric, sample, list(named), list(named.values()), HELP[metric])


def add_to(values: MmapedDict, key: str, amount: float) -> None:
    value, _ = values.read_value(key)
    values.write_value(key, value + amount, 0.0)
