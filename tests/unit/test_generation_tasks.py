# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The tasks of the benchmark of whole answers: seeded, all different, and checked exactly."""

from __future__ import annotations

import pytest

from benchmarks.generation import instructions as on
from benchmarks.generation.arithmetic import arithmetic, has_result, last_number
from benchmarks.generation.instructions import instructions
from benchmarks.generation.task import is_right, long, prompt_of, text_of
from flexquant.errors import FlexQuantError
from tests.checkpoints import base_config, byte_tokenizer

KINDS = [arithmetic, instructions, long]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.mark.parametrize("make", KINDS)
def test_a_seed_gives_the_same_different_tasks_however_many_and_another_others(make):
    first, fewer, other = ([t.question for t in make(n, seed)] for n, seed in ((20, 3), (12, 3), (20, 4)))
    assert first[:12] == fewer and first != other
    assert len(set(first)) == 20


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
    [
        ("4 + 7 = 11. The answer is 11.", 11),
        ("so 2 x 617.25 = 1,234.5.", 1234.5),
        ("83-27", 27),
        ("5 - 8 = -3", -3),
        ("numbers 1, 2, 3", 3),
        ("eleven", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number
    assert has_result(11)(text) == (number == 11)


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
    assert on.has_no_comma("")
    assert not any(is_right(task, "") for task in instructions(20, 0))


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
    assert text_of(ids, tokenizer).endswith("Answer: 4")
    assert text_of([257], tokenizer) == ""
