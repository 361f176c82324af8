# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""CUDA graphs: the sizes to which vLLM pads passes, and whether measured times come from such passes."""

from __future__ import annotations

from collections.abc import Mapping

from flexquant.pass_times import PassTimes

LARGEST = 512
"""Tokens. It is 1024 on a B200, which is not modelled and matters with more than 256 sequences only."""


def default_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return what vLLM 0.32 captures by default (``VllmConfig._set_cudagraph_sizes``), ascending."""
    ceiling = min(2 * max_num_seqs, LARGEST)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, ceiling + 1, 16), max_num_seqs, max_num_batched_tokens}
    return tuple(sorted(size for size in sizes if size <= min(ceiling, max_num_batched_tokens)))


def measured_with_graphs(times: PassTimes) -> bool:
    """Whether ``flexquant tune`` measured the times on a GPU, not eagerly."""
    machine, engine = times.origin.get("machine"), times.origin.get("engine_arguments")
    eager = isinstance(engine, Mapping) and bool(engine.get("enforce_eager"))
    return isinstance(machine, Mapping) and machine.get("gpu") is not None and not eager
