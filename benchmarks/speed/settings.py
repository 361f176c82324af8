# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How much is measured: for a quick look on a CPU, for a CPU, for a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.speed.workloads import Workload
from flexquant.evaluation.comparison import Effort

PARTS = ("kernels", "serving")
LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
HEAD = "lm_head"


@dataclass(frozen=True)
class Settings:
    """What the parts run by default; the command line may replace any of it."""

    subjects: tuple[str, ...]
    schemes: tuple[str, ...]
    layers: tuple[str, ...]
    tokens: tuple[int, ...]
    """Numbers of tokens (M) of the kernel measurements."""
    serving: tuple[Workload, ...]
    effort: Effort
    """Rounds of serving."""
    seconds: float
    """Time for each kernel cell."""


IN_TURN = 30
"""Requests of a cell in which one comes after another: a single request is a single sample."""


def in_turn(length: int, output: int) -> Workload:
    return Workload(IN_TURN, length, output, at_once=1)


def batches(requests: tuple[int, ...], inputs: tuple[int, ...], output: int) -> tuple[Workload, ...]:
    return tuple(Workload(count, length, output) for length in inputs for count in requests)


QUICK = Settings(
    subjects=("w8a8", "w4a16", "flexquant:phase-batch"),
    schemes=("bf16", "w8a8", "w4a16"),
    layers=("gate_up_proj", "down_proj"),
    tokens=(1, 16, 128),
    serving=(in_turn(64, 4), Workload(8, 64, 16), Workload(10, 64, 12, rate=8, spread=0.5)),
    effort=Effort(rounds=2, max_rounds=2),
    seconds=0.5,
)
CPU = Settings(
    subjects=("bf16", *QUICK.subjects),
    schemes=("bf16", "w8a8", "w4a16", "w4a8", "fp8", "one-copy", "nested"),
    layers=LAYERS,
    tokens=(1, 4, 16, 64, 256),
    serving=(in_turn(64, 8), *batches((8,), (64, 256), 32), Workload(24, 128, 32, rate=1, spread=0.5)),
    effort=Effort(rounds=6, max_rounds=12),
    seconds=1.0,
)
GPU = Settings(
    subjects=("w8a8", "w4a16", "w4a8", "bf16", "flexquant:phase-batch"),
    schemes=("bf16", "w8a8", "fp8", "w4a16", "w4a8", "one-copy", "nested"),
    layers=LAYERS,
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    serving=(
        in_turn(1024, 16),
        *batches((8, 32, 128), (1024,), 128),
        *(Workload(15 * rate, 1024, 256, rate=rate, spread=0.5) for rate in (5, 20)),
        *batches((8, 64), (128, 4096), 128),
    ),
    effort=Effort(rounds=6, max_rounds=20),
    seconds=0.3,
)
"""Defaults on a GPU; the requests of a stream arrive for 15 s."""
