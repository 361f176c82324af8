# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which cells are measured, and in which order: whole rounds, then more where the intervals are too wide.

Rounds go once forward and once backward through the subjects, so that what drifts hits them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.speed.comparing import Rounds, paired_ratios, pairs
from benchmarks.speed.subjects import FLEXQUANT, Subject
from benchmarks.speed.tables import METRICS, RATIOS
from benchmarks.speed.workloads import Workload
from flexquant.errors import FlexQuantError
from flexquant.measuring.comparison import Effort, compare

OVERHEAD = "overhead"


@dataclass(frozen=True)
class Cell:
    """One measurement: one workload, one subject, one round."""

    part: str
    workload: Workload
    round: int
    subject: Subject


@dataclass(frozen=True)
class Plan:
    """What is measured of the parts ``serving`` and ``overhead``."""

    parts: dict[str, Sequence[Workload]]
    subjects: Sequence[Subject]
    effort: Effort

    def __post_init__(self) -> None:
        """Raise FlexQuantError for an overhead that no pair of subjects shows."""
        if OVERHEAD in self.parts:
            paired_subjects(self.subjects)

    @property
    def first(self) -> list[Cell]:
        """Return the cells that are measured in any case, by whole rounds, so that a part is of use too."""
        return [
            cell
            for number in range(self.effort.rounds)
            for part, workloads in self.parts.items()
            for workload in workloads
            for cell in self.cells(part, workload, number)
        ]

    def added(self, measured: Callable[[str, Workload], dict[str, Rounds]]) -> Iterator[list[Cell]]:
        """Yield the cells of one more round at a time, for the workloads with an interval that is too wide.

        ``measured(part, workload)`` is called before every round and returns every subject's rounds so far.
        """
        for number in range(self.effort.rounds, self.effort.max_rounds):
            wide = [
                (part, workload)
                for part, workloads in self.parts.items()
                for workload in workloads
                if not is_narrow(measured(part, workload), part, self.effort.width)
            ]
            if not wide:
                return
            yield [cell for part, workload in wide for cell in self.cells(part, workload, number)]

    def cells(self, part: str, workload: Workload, number: int) -> list[Cell]:
        """Return the cells of a workload's round, in the order to measure them."""
        subjects = paired_subjects(self.subjects) if part == OVERHEAD else list(self.subjects)
        return [Cell(part, workload, number, s) for s in subjects[:: -1 if number % 2 else 1]]


def is_narrow(subjects: dict[str, Rounds], part: str, width: float) -> bool:
    """Return whether the report's ratios of a workload all have intervals narrower than ``width``."""
    ratios = [
        paired_ratios(subjects[subject], subjects[static], METRICS[metric][0])
        for subject, static in pairs(list(subjects), constant=part == OVERHEAD)
        for metric in RATIOS
    ]
    return all(compare(found).is_narrow(width) for found in ratios if found)


def paired_subjects(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the static checkpoints that FlexQuant also serves by a constant policy, each beside it."""
    by_name = {subject.name: subject for subject in subjects}
    found = [(s, by_name[FLEXQUANT + name]) for name, s in by_name.items() if FLEXQUANT + name in by_name]
    if not found:
        raise FlexQuantError(
            f"part 'overhead' compares e.g. w8a8 with flexquant:w8a8, but the subjects are "
            f"{', '.join(by_name)}; add such a pair to --subjects, or leave the part out"
        )
    return [subject for pair in found for subject in pair]
