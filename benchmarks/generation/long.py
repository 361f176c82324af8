# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open questions with long answers: no answer is right or wrong, but where do two answers part?"""

from __future__ import annotations

from functools import partial
from random import Random

from benchmarks.generation.task import Family, Task, draw

SUBJECTS = {
    "explanation": (
        "Explain in detail how {} works, step by step.",
        ("a bicycle", "the human heart", "a refrigerator", "the water cycle", "a library", "an election"),
    ),
    "story": (
        "Write a long story about {}.",
        ("a lost key", "two brothers", "a lighthouse", "a talking cat", "the last tree", "a night train"),
    ),
    "essay": (
        "Write a detailed essay about {}.",
        ("the history of bread", "life in a village", "public transport", "friendship", "the Moon", "work"),
    ),
    "guide": (
        "Write a complete beginner's guide to {}.",
        ("gardening", "saving money", "cooking rice", "learning a language", "painting", "hiking"),
    ),
}


def _open(family: str, random: Random) -> Task:
    question, subjects = SUBJECTS[family]
    return Task(family, question.format(random.choice(subjects)))


FAMILIES: tuple[Family, ...] = tuple(partial(_open, family) for family in SUBJECTS)


def long(number: int, seed: int) -> list[Task]:
    """Return ``number`` tasks, of each family in turn."""
    return draw(FAMILIES, number, seed)
