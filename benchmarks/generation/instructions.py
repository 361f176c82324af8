# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Instructions on the form of an answer, which can be checked exactly, as IFEval has them (arXiv 2311.07911).

The checks do not ask whether an answer is true or good.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from random import Random

from benchmarks.generation.task import Check, Family, Task, draw

WORDS = (
    *("bread", "bridge", "candle", "forest", "garden", "letter", "market"),
    *("music", "ocean", "river", "silver", "stone", "summer", "window"),
)
TOPICS = (
    *("the sea", "a small dog", "winter", "a train journey", "the moon", "an old house", "football"),
    *("a farmer", "the city", "coffee", "a school", "rain", "a birthday", "the mountains"),
)
GROUPS = ("animals", "fruits", "countries", "colours", "sports", "tools", "rivers", "musical instruments")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation around them."""
    return [word for part in text.casefold().split() if (word := part.strip(".,;:!?\"'()*-"))]


def is_one_of(options: Collection[str]) -> Check:
    """Return the check that an answer is one option alone, in any case, with or without a full stop."""
    return lambda text: text.removesuffix(".").casefold() in options


def is_exactly(expected: str) -> Check:
    return lambda text: text == expected


def is_list_of(number: int) -> Check:
    """Return the check that an answer is ``number`` lines of ``- `` and an item; blank lines do not count."""

    def check(text: str) -> bool:
        written = [line for line in text.splitlines() if line.strip()]
        return len(written) == number and all(re.match(r"- +\S", line) for line in written)

    return check


def ends_with(word: str) -> Check:
    return lambda text: words_of(text)[-1:] == [word]


def begins_with(word: str) -> Check:
    return lambda text: words_of(text)[:1] == [word]


def has_words(*expected: str) -> Check:
    return lambda text: set(expected) <= set(words_of(text))


def has_no_comma(text: str) -> bool:
    return "," not in text


def has_number_of_words(number: int) -> Check:
    return lambda text: len(words_of(text)) == number


def choose(*options: str) -> str:
    return f"Choose one of these words and answer with that word alone: {', '.join(options)}."


def _one_word(random: Random) -> Task:
    options = random.sample(WORDS, 4)
    example = choose("paper", "cloud", "table", "horse"), "table"
    return Task("one word of a list", choose(*options), is_one_of(options), (example,))


def repeat(sentence: str) -> str:
    return f"Repeat this sentence exactly and write nothing else: {sentence}"


def _repeat(random: Random) -> Task:
    first, second, third = random.sample(WORDS, 3)
    sentence = f"The {first} was near the {second}, and nobody saw the {third}."
    other = "My uncle has a red boat, but he never learned to swim."
    return Task("sentence repeated", repeat(sentence), is_exactly(sentence), ((repeat(other), other),))


def lines(number: int, group: str) -> str:
    return f"List {number} {group}. Begin every line with '- ' and write nothing before or after the list."


def _list(random: Random) -> Task:
    number, group = random.randint(2, 6), random.choice(GROUPS)
    example = lines(3, "planets"), "- Mars\n- Venus\n- Saturn"
    return Task("list of lines", lines(number, group), is_list_of(number), (example,))


def sentence(topic: str, demand: str) -> str:
    return f"Write one sentence about {topic}. {demand}"


def _end(random: Random) -> Task:
    demand, word = "The last word must be '{}'.", random.choice(WORDS)
    example = sentence("a cat", demand.format("door")), "The cat waits all day behind the door."
    question = sentence(random.choice(TOPICS), demand.format(word))
    return Task("last word given", question, ends_with(word), (example,))


def _begin(random: Random) -> Task:
    demand, word = "The first word must be '{}'.", random.choice(WORDS)
    example = sentence("bees", demand.format("honey")), "Honey is what bees make from flowers."
    question = sentence(random.choice(TOPICS), demand.format(word))
    return Task("first word given", question, begins_with(word), (example,))


def _include(random: Random) -> Task:
    demand, words = "It must have the words '{}' and '{}'.", random.sample(WORDS, 2)
    example = sentence("a king", demand.format("clock", "soup")), "The king ate soup under an old clock."
    question = sentence(random.choice(TOPICS), demand.format(*words))
    return Task("two words given", question, has_words(*words), (example,))


def _capitals(random: Random) -> Task:
    demand = "USE CAPITAL LETTERS ONLY."
    example = sentence("snow", demand), "SNOW FELL ON THE QUIET FIELDS."
    return Task("capitals", sentence(random.choice(TOPICS), demand), str.isupper, (example,))


def _small_letters(random: Random) -> Task:
    demand = "use small letters only, no capital letters."
    example = sentence("trees", demand), "trees give us shade and clean air."
    return Task("small letters", sentence(random.choice(TOPICS), demand), str.islower, (example,))


def _no_comma(random: Random) -> Task:
    question = "Write three sentences about {} without using any comma."
    answer = "Fire gives light. It also gives heat. People have used it for ages."
    example = question.format("fire"), answer
    return Task("no comma", question.format(random.choice(TOPICS)), has_no_comma, (example,))


def _number_of_words(random: Random) -> Task:
    number, question = random.randint(2, 5), "Describe {} in exactly {} words."
    example = question.format("the sun", 4), "Bright, hot, round, golden"
    topic = random.choice(TOPICS)
    return Task("number of words", question.format(topic, number), has_number_of_words(number), (example,))


FAMILIES: tuple[Family, ...] = (
    *(_one_word, _repeat, _list, _end, _begin, _include, _capitals, _small_letters, _no_comma),
    _number_of_words,
)


def instructions(number: int, seed: int) -> list[Task]:
    """Return ``number`` tasks, of each family in turn."""
    return draw(FAMILIES, number, seed)
