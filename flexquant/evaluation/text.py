# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the input of an evaluation: rows of a text as token ids, and questions in the chat template."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.documents.texts import draw_rows, read_documents
from flexquant.errors import FlexQuantError
from flexquant.evaluation.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_rows(text: str | Path, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> list[list[int]]:
    """Return ``settings.samples`` rows of ``settings.row_tokens`` token ids, drawn from a text or JSONL file.

    Raises FlexQuantError for a file that cannot be read or has too few tokens.
    """
    if not Path(text).is_file():
        raise FlexQuantError(f"there is no file {text}; give a text or .jsonl file to measure on")
    return draw_rows(
        read_documents(text),
        tokenizer,
        samples=settings.samples,
        length=settings.row_tokens,
        seed=settings.seed,
        name=f"the text {text}",
    )


def read_questions(path: str | Path | None) -> list[str]:
    """Return the lines of a file that are not blank; None: the questions that come with FlexQuant.

    Raises FlexQuantError for a file that cannot be read or holds no question.
    """
    file = importlib.resources.files(__package__) / "questions.txt" if path is None else Path(path)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise FlexQuantError(f"cannot read the questions {path} as UTF-8 text ({e})") from e
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise FlexQuantError(f"{path} holds no questions; write one a line, or pass --no-questions")
    return questions


def question_prompts(questions: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each question, in the chat template if the tokenizer has one."""
    if not tokenizer.chat_template:
        return [tokenizer(question)["input_ids"] for question in questions]
    return [chat_prompt([{"role": "user", "content": question}], tokenizer) for question in questions]


def chat_prompt(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a conversation in the chat template, with the prompt for an answer."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
