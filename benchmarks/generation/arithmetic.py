# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Arithmetic worked out in steps, so that an answer is long enough for errors of decoding to add up.

An answer is right if its last number is the result. The families differ in how hard they are: products of
one digit are for a model of a hundred million weights, those of two digits for one of billions.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate
from random import Random

from benchmarks.generation.task import Check, Family, Task, draw

NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")
WORDS = (
    *("apple", "bread", "chair", "cloud", "drum", "fish", "glass", "horse"),
    *("lamp", "moon", "paper", "river", "shoe", "stone", "table", "tree"),
)


def last_number(text: str) -> float | None:
    """Return the last number of a text, e.g. 1234.5 of ``so 2 x 617.25 = 1,234.5.``; None without one."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def has_result(result: int) -> Check:
    """Return the check that the last number of an answer is ``result``."""
    return lambda text: last_number(text) == result


def solution(*steps: str, result: int) -> str:
    return f"{'. '.join(steps)}. The answer is {result}."


Asked = tuple[str, str, int]
"""A question, how it is worked out, and the result."""


def add_up(*numbers: int) -> Asked:
    sums = list(accumulate(numbers))
    steps = [
        f"{before} + {n} = {after}" for before, n, after in zip(sums, numbers[1:], sums[1:], strict=False)
    ]
    question = f"Add these numbers one after another: {', '.join(map(str, numbers))}."
    return question, solution(*steps, result=sums[-1]), sums[-1]


def plus(a: int, b: int) -> Asked:
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    steps = [f"{a // 10 * 10} + {b // 10 * 10} = {tens}", f"{a % 10} + {b % 10} = {ones}"]
    return f"What is {a} + {b}?", solution(*steps, f"{tens} + {ones} = {a + b}", result=a + b), a + b


def minus(a: int, b: int) -> Asked:
    return f"What is {a} - {b}?", solution(f"{a} - {b} = {a - b}", result=a - b), a - b


def times(a: int, b: int) -> Asked:
    return f"What is {a} x {b}?", solution(f"{a} x {b} = {a * b}", result=a * b), a * b


def times_two_digits(a: int, b: int) -> Asked:
    tens, ones = a * (b // 10 * 10), a * (b % 10)
    steps = [f"{a} x {b // 10 * 10} = {tens}", f"{a} x {b % 10} = {ones}", f"{tens} + {ones} = {a * b}"]
    return f"What is {a} x {b}?", solution(*steps, result=a * b), a * b


def count_on(first: int, step: int, number: int) -> Asked:
    counted = [first + step * i for i in range(number)]
    question = f"Count from {first} in steps of {step}. Write {number} numbers."
    return question, solution(", ".join(map(str, counted)), result=counted[-1]), counted[-1]


def count_words(*words: str) -> Asked:
    steps = [f"{number} {word}" for number, word in enumerate(words, 1)]
    question = f"How many words are in this list? {', '.join(words)}"
    return question, solution(", ".join(steps), result=len(words)), len(words)


def _task(family: str, asked: Asked, *examples: Asked) -> Task:
    question, _, result = asked
    return Task(family, question, has_result(result), tuple(example[:2] for example in examples))


def _add_up(terms: int, random: Random) -> Task:
    asked = add_up(*(random.randint(1, 9) for _ in range(terms)))
    examples = ([4, 9, 2, 6, 7, 3], [7, 5, 8, 1, 3, 6], [2, 6, 9, 5, 8, 4])
    return _task(f"{terms} numbers added up", asked, *(add_up(*example[:terms]) for example in examples))


def _plus(random: Random) -> Task:
    asked = plus(random.randint(11, 99), random.randint(11, 99))
    return _task("two-digit sum", asked, plus(34, 57), plus(62, 25), plus(48, 71))


def _minus(random: Random) -> Task:
    difference, b = random.randint(2, 9), random.randint(2, 9)
    return _task("difference", minus(difference + b, b), minus(13, 6), minus(9, 4), minus(11, 2))


def _times(random: Random) -> Task:
    asked = times(random.randint(2, 9), random.randint(2, 9))
    return _task("product", asked, times(6, 4), times(1, 8), times(3, 10))


def _times_two_digits(random: Random) -> Task:
    asked = times_two_digits(random.randint(2, 9), random.randint(11, 99))
    return _task("two-digit product", asked, times_two_digits(6, 14), times_two_digits(3, 27))


def _count_on(random: Random) -> Task:
    asked = count_on(random.randint(1, 60), random.choice([2, 3, 5, 10]), random.randint(4, 8))
    return _task("counting in steps", asked, count_on(20, 5, 4), count_on(7, 2, 6), count_on(31, 10, 5))


def _count_words(random: Random) -> Task:
    asked = count_words(*random.sample(WORDS, random.randint(3, 8)))
    examples = ("pen", "door", "leaf"), ("sun", "hat", "rope", "cup", "wall"), ("coin", "boat", "egg", "key")
    return _task("words counted", asked, *(count_words(*words) for words in examples))


FAMILIES: tuple[Family, ...] = (
    *(_times, partial(_add_up, 3), _count_on, _minus, partial(_add_up, 4), _count_words),
    *(partial(_add_up, 6), _plus, _times_two_digits),
)


def arithmetic(number: int, seed: int) -> list[Task]:
    """Return ``number`` tasks, of each family in turn."""
    return draw(FAMILIES, number, seed)
