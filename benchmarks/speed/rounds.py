# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which cells are measured, and in which order: whole rounds, then more where the intervals are too wide.

Rounds go once forward and once backward through the subjects, so that what drifts hits them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.speed.comparing import Rounds, paired_ratios, pairs
from benchmarks.speed.subjects import Subject
from benchmarks.speed.tables import METRICS, RATIOS
from benchmarks.speed.workloads import Workload
from flexquant.evaluation.comparison import Effort, compare


@dataclass(frozen=True)
class Cell:
    """One measurement: one workload, one subject, one round."""

    workload: Workload
    round: int
    subject: Subject


@dataclass(frozen=True)
class Plan:
    """The servers' measurements of a run."""

    workloads: Sequence[Workload]
    subjects: Sequence[Subject]
    effort: Effort

    @property
    def first(self) -> list[Cell]:
        """Return the cells that are measured in any case, by whole rounds, so that a few are of use too."""
        return [
            cell
            for number in range(self.effort.rounds)
            for workload in self.workloads
            for cell in self.cells(workload, number)
        ]

    def added(self, measured: Callable[[Workload], dict[str, Rounds]]) -> Iterator[list[Cell]]:
        """Yield the cells of one more round at a time, for the workloads with an interval that is too wide.

        ``measured(workload)`` is called before every round and returns every subject's rounds so far.
        """
        for number in range(self.effort.rounds, self.effort.max_rounds):
            wide = [w for w in self.workloads if not is_narrow(measured(w), self.effort.width)]
            if not wide:
                return
            yield [cell for workload in wide for cell in self.cells(workload, number)]

    def cells(self, workload: Workload, number: int) -> list[Cell]:
        """Return the cells of a workload's round, in the order to measure them."""
        return [Cell(workload, number, s) for s in list(self.subjects)[:: -1 if number % 2 else 1]]


def is_narrow(subjects: dict[str, Rounds], width: float) -> bool:
    """Return whether the report's ratios of a workload all have intervals narrower than ``width``."""
    ratios = [
        paired_ratios(subjects[subject], subjects[static], METRICS[metric][0])
        for subject, static in pairs(subjects)
        for metric in RATIOS
    ]
    return all(compare(found).is_narrow(width) for found in ratios if found)
