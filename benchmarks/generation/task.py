# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A task: a question, how such questions are answered, what an answer has to hold; and open questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flexquant.documents.texts import document_tokens
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Check = Callable[[str], bool]
DRAWS = 1000
"""How often a question is drawn again because it is there already."""


@dataclass(frozen=True)
class Task:
    family: str
    """The sort of question, as the results name it."""
    question: str
    check: Check | None = None
    """The function that says whether a stripped answer is right; None if the task has no right answer."""
    examples: tuple[tuple[str, str], ...] = ()
    """Questions of the same family with their answers, which the prompt shows before the question."""


Family = Callable[[random.Random], Task]


def draw(families: Sequence[Family], count: int, seed: int) -> list[Task]:
    """Return ``count`` tasks with different questions, of each family in turn; the same for the same seed.

    Raises FlexQuantError where a family has too few questions.
    """
    random_numbers = random.Random(seed)
    found: dict[str, Task] = {}
    for number in range(count):
        family = families[number % len(families)]
        drawn = (family(random_numbers) for _ in range(DRAWS))
        task = next((task for task in drawn if task.question not in found), None)
        if task is None:
            raise FlexQuantError(
                f"there are no {count} different tasks of this kind: {number} were found; ask for fewer"
            )
        found[task.question] = task
    return list(found.values())


def prompt_of(task: Task, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a task's token ids: a conversation, or plain text if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        turns = [f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in task.examples]
        return list(tokenizer("".join(turns) + f"Question: {task.question}\nAnswer:")["input_ids"])
    messages: list[dict[str, str]] = []
    for question, answer in task.examples:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": task.question})
    return document_tokens(messages, tokenizer, f"the task {task.family}", to_answer=True)


def text_of(answer: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return an answer's text without special tokens and white space around it.

    A model without a chat template goes on with questions of its own, which are left out.
    """
    text: str = tokenizer.decode(answer, skip_special_tokens=True)
    if not tokenizer.chat_template:
        text = text.partition("\nQuestion:")[0]
    return text.strip()


def is_right(task: Task, text: str) -> bool:
    """Return whether an answer is right; an empty one never is."""
    assert task.check is not None
    return bool(text) and task.check(text)


OPEN = {
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


def _open(family: str, numbers: random.Random) -> Task:
    question, subjects = OPEN[family]
    return Task(family, question.format(numbers.choice(subjects)))


def long(number: int, seed: int) -> list[Task]:
    """Return ``number`` open questions: no answer is right or wrong, but where do two answers part?"""
    return draw([partial(_open, family) for family in OPEN], number, seed)
