# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The benchmark of whole answers: its statistics against published and counted numbers, and its tasks."""

import math
import random

import pytest

from benchmarks.generation import instructions as on
from benchmarks.generation.arithmetic import arithmetic, has_result, last_number
from benchmarks.generation.instructions import instructions
from benchmarks.generation.intervals import Median, compare_paired, mcnemar, median_of, wilson
from benchmarks.generation.results import difference, first_difference, parting, share
from benchmarks.generation.task import is_right, long, prompt_of, text_of
from flexquant.errors import FlexQuantError
from tests.checkpoints import base_config, byte_tokenizer


def paired(both: int, only_first: int, only_second: int, neither: int):
    first = [True] * (both + only_first) + [False] * (only_second + neither)
    second = [True] * both + [False] * only_first + [True] * only_second + [False] * neither
    return compare_paired(first, second)


def test_wilsons_interval_solves_its_equation():
    """The interval's ends are the shares from which the found share is 1.96 standard errors away."""
    for right, number in [(5, 10), (1, 7), (81, 263), (15, 148)]:
        for end in wilson(right, number):
            error = math.sqrt(end * (1 - end) / number)
            assert abs(right / number - end) == pytest.approx(1.959964 * error, rel=1e-5)
    assert wilson(0, 20) == (0, pytest.approx(0.1611, abs=1e-4))
    assert wilson(20, 20) == (pytest.approx(0.8389, abs=1e-4), 1)


def test_paired_difference_is_newcombes_and_can_be_turned_round_and_mcnemar_counts_coin_throws():
    found, turned = paired(36, 12, 2, 0), paired(36, 2, 12, 0)
    assert (found.number, found.only_first, found.only_second) == (50, 12, 2)
    assert found.difference == pytest.approx(0.2)
    assert (found.low, found.high) == pytest.approx((0.0569, 0.3404), abs=1e-4)
    assert (found.low, found.high) == pytest.approx((-turned.high, -turned.low)) and found.p == turned.p
    assert mcnemar(5, 0) == 2 / 2**5 and mcnemar(1, 8) == pytest.approx(2 * (1 + 9) / 2**9)
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1


@pytest.mark.parametrize("counts", [(10, 0, 0, 0), (0, 0, 0, 10), (5, 0, 0, 5)])
def test_the_same_answers_differ_by_nothing(counts):
    found = paired(*counts)
    assert found.difference == 0 and found.p == 1 and found.low <= 0 <= found.high


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    numbers = random.Random(0)
    held = 0
    for _ in range(400):
        drawn = numbers.choices(["both", "first", "second", "neither"], [0.4, 0.15, 0.05, 0.4], k=60)
        found = paired(*(drawn.count(kind) for kind in ("both", "first", "second", "neither")))
        held += found.low <= 0.1 <= found.high
    assert 0.92 < held / 400 < 0.99


@pytest.mark.parametrize(
    ("values", "median"),
    [
        ([3, 1, 2], Median(2, None)),  # of fewer than six none has 95 %
        ([6, 1, 2, 3, 4, 5], Median(3.5, (1, 6))),
        (range(1, 17), Median(8.5, (4, 13))),
        # Answers without a difference are beyond all others.
        ([None, 1, None, None, 2, None], Median(None, (1, None))),
        ([None] * 8, Median(None, (None, None))),
        ([7, 5, None], Median(7, None)),
    ],
)
def test_the_interval_of_a_median_is_two_of_the_values(values, median):
    assert median_of(values) == median


@pytest.mark.parametrize(
    "first, second, token",
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 2), ([1, 2, 3], [9], 1), ([1, 2], [1, 2, 3], 3)]
    + [([], [4], 1), ([], [], None)],
)
def test_first_difference(first, second, token):
    assert first_difference(first, second) == first_difference(second, first) == token


def test_cells_of_the_table():
    assert share({"right": 5, "of": 10, "interval": wilson(5, 10)}) == "50% (24% – 76%)"
    found = {"difference": -0.05, "low": -0.1, "high": 0.02, "only_first": 2, "only_second": 7}
    assert difference(found) == "-5 (-10 to +2; 2 : 7)"
    parted = {"median": 31.5, "interval": [9, None], "same": 4, "of": 16}
    assert parting(parted) == "31.5 (9 – none), 4 of 16 the same"
    assert parting({"median": None, "interval": None, "same": 3, "of": 3}) == "none, 3 of 3 the same"
    assert difference(None) == parting(None) == "–"


KINDS = [arithmetic, instructions, long]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.mark.parametrize("make", KINDS)
def test_a_seed_gives_the_same_different_tasks_however_many_and_another_others(make):
    first, fewer, other = ([t.question for t in make(n, seed)] for n, seed in ((20, 3), (12, 3), (20, 4)))
    assert first[:12] == fewer and first != other and len(set(first)) == 20


def test_more_than_there_are_is_refused():
    with pytest.raises(FlexQuantError, match="there are no 30 different tasks of this kind"):
        long(30, 0)


@pytest.mark.parametrize("make", [arithmetic, instructions])
def test_examples_end_with_their_result_and_do_not_give_the_answer_away(make):
    for task in make(30, 0):
        assert task.examples
        for question, answer in task.examples:
            assert question != task.question
            if make is arithmetic:
                assert has_result(int(answer.removesuffix(".").rpartition(" ")[2]))(answer)


@pytest.mark.parametrize(
    "text, number",
    [("4 + 7 = 11. The answer is 11.", 11), ("so 2 x 617.25 = 1,234.5.", 1234.5), ("83-27", 27)]
    + [("5 - 8 = -3", -3), ("numbers 1, 2, 3", 3), ("eleven", None), ("", None)],
)
def test_last_number(text, number):
    assert last_number(text) == number and has_result(11)(text) == (number == 11)


@pytest.mark.parametrize(
    "check, right, wrong",
    [
        (on.is_one_of(["river", "stone"]), ["river", "Stone."], ["river stone", "the river", "moon"]),
        (on.is_exactly("The end."), ["The end."], ["The end", "the end.", '"The end."']),
        (on.is_list_of(2), ["- a\n- b c", "- a\n\n- b"], ["- a", "- a\n- b\n- c", "1. a\n2. b", "- a\n- "]),
        (on.is_list_of(2), ["-  a\n- b"], ["Here:\n- a\n- b", "-a\n-b"]),
        (on.ends_with("door"), ["By the door.", "Door!", 'the "door".'], ["doors", "door is open"]),
        (on.begins_with("honey"), ["Honey is sweet.", "'honey'"], ["The honey"]),
        (on.has_words("clock", "soup"), ["Soup, then a clock."], ["soup", "clockwork soup"]),
        (str.isupper, ["SNOW FELL, TWICE 2."], ["Snow", "123", "SNOW fELL"]),
        (str.islower, ["trees give shade."], ["Trees", "12"]),
        (on.has_no_comma, ["One. Two."], ["One, two"]),
        (on.has_number_of_words(3), ["Red, hot - sun", "a b c."], ["a b", "a b c d"]),
    ],
)
def test_forms_of_answers(check, right, wrong):
    assert [check(text) for text in right] == [True] * len(right)
    assert [check(text) for text in wrong] == [False] * len(wrong)


def test_an_empty_answer_is_never_right():
    assert on.has_no_comma("") and not any(is_right(task, "") for task in instructions(20, 0))


def test_a_prompt_is_a_conversation_where_the_model_has_a_template():
    tokenizer = byte_tokenizer(base_config())
    task = arithmetic(1, 0)[0]
    plain = tokenizer.decode(prompt_of(task, tokenizer))
    question, answer = task.examples[0]
    assert plain.startswith(f"Question: {question}\nAnswer: {answer}\n\n")
    assert plain.endswith(f"Question: {task.question}\nAnswer:")
    tokenizer.chat_template = TEMPLATE
    chat = tokenizer.decode(prompt_of(task, tokenizer))
    assert chat.startswith(f"[user]{question}[assistant]{answer}")
    assert chat.endswith(f"[user]{task.question}[assistant]")


def test_questions_that_a_model_without_a_template_asks_itself_are_left_out():
    tokenizer = byte_tokenizer(base_config())
    ids = tokenizer(" 11.\n\nQuestion: What is 2 + 2?\nAnswer: 4")["input_ids"]
    assert text_of(ids, tokenizer) == "11."
    tokenizer.chat_template = TEMPLATE
    assert text_of(ids, tokenizer).endswith("Answer: 4") and text_of([257], tokenizer) == ""
