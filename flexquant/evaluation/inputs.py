# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the inputs of an evaluation: settings, the merged checkpoint, rows of a text, and questions."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import build_config, language_config, load_tokenizer
from flexquant.checkpoint.folder import find_model, read_16_bit_config
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import CONFIG_FILE
from flexquant.checkpoint.model_config import SETTINGS_FILES, count_layers
from flexquant.documents.texts import document_tokens, draw_rows, read_documents
from flexquant.errors import FlexQuantError, UsageError, explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation. Raises :class:`UsageError` for values that cannot be measured."""

    batch_sizes: tuple[int, ...] = (8, 48)
    """Sequences in a decode pass, one number for each run, sorted and distinct."""
    samples: int = 48
    """Rows of text; a multiple of every batch size, so that each batch is full."""
    prompt_tokens: int = 256
    """Tokens of a row that are prefilled."""
    tokens: int = 64
    """Tokens of a row that are forced after the prompt, and scored."""
    seed: int = 0
    """Seed for drawing rows from the text."""
    answer_tokens: int = 64
    """Largest number of tokens in an answer."""

    def __post_init__(self) -> None:
        counts = ("samples", "prompt_tokens", "tokens", "answer_tokens")
        numbers = [("--" + name.replace("_", "-"), getattr(self, name)) for name in counts]
        for name, number in [*numbers, *(("a batch size", size) for size in self.batch_sizes)]:
            if number < 1:
                raise UsageError(f"{name} is {number}; give a whole number of at least 1")
        if not self.batch_sizes:
            raise UsageError("no batch size is given; give at least one, e.g. --batch-sizes 8,48")
        for batch_size in self.batch_sizes:
            if self.samples % batch_size:
                problem = f"{self.samples} samples are not a multiple of the batch size {batch_size}"
                full = -(-self.samples // batch_size) * batch_size
                raise UsageError(f"{problem}; every batch must be full: give e.g. --samples {full}")
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, prompt and continuation."""
        return self.prompt_tokens + self.tokens


class Subject:
    """A merged checkpoint, with the properties of its model that an evaluation needs."""

    def __init__(self, folder: str | Path) -> None:
        """Read headers, config and tokenizer; raise FlexQuantError for anything but a merged checkpoint."""
        self.checkpoint = MergedCheckpoint.open(folder, published=True)
        self.folder = self.checkpoint.folder
        self.num_layers = count_layers(self.checkpoint.config)
        config = language_config(self.checkpoint.config, self.folder)
        self.vocab_size: int = config.vocab_size
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        """Most tokens of a sequence; None if the model has no limit."""
        self.tokenizer = load_tokenizer(self.folder)

    def check_length(self, tokens: int, what: str) -> None:
        """Raise FlexQuantError if a sequence of the model cannot have so many ``tokens``."""
        if self.max_length is not None and tokens > self.max_length:
            most = f"the model's max_position_embeddings is {self.max_length}"
            advice = "lower --prompt-tokens, --tokens or --answer-tokens"
            raise FlexQuantError(f"{what} take {tokens} tokens, but {most}; {advice}")

    def check_reference(self, model: str | Path) -> None:
        """Raise FlexQuantError unless ``model`` is in 16 bit, with this tokenizer: else KL means nothing."""
        problem = f"the reference {model} cannot be read"
        with explained(problem, "give the folder or Hugging Face id of the 16-bit model", (Exception,)):
            config = build_config(read_16_bit_config(find_model(model, (CONFIG_FILE, *SETTINGS_FILES))))
        vocab_size = config.get_text_config().vocab_size
        if vocab_size != self.vocab_size:
            problem = f"the reference {model} has a vocabulary of {vocab_size} tokens, but {self.folder} one"
            advice = "give the 16-bit model that the variants were made from"
            raise FlexQuantError(f"{problem} of {self.vocab_size}; {advice}")
        if load_tokenizer(model).get_vocab() != self.tokenizer.get_vocab():
            problem = f"the tokenizers of the reference {model} and of {self.folder} differ"
            raise FlexQuantError(f"{problem}; give the 16-bit model that the variants were made from")


def read_rows(text: str | Path, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> list[list[int]]:
    """Return rows of token ids drawn from a text or JSONL file; raise FlexQuantError if it has too few."""
    if not Path(text).is_file():
        raise FlexQuantError(f"there is no file {text}; give a text or .jsonl file to measure on")
    size = {"samples": settings.samples, "length": settings.row_tokens, "seed": settings.seed}
    return draw_rows(read_documents(text), tokenizer, **size, name=f"the text {text}")


def read_questions(path: str | Path | None) -> list[str]:
    """Return a file's non-blank lines (None: FlexQuant's questions); raise FlexQuantError if it has none."""
    file = importlib.resources.files(__package__) / "questions.txt" if path is None else Path(path)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise FlexQuantError(f"cannot read the questions {path} as UTF-8 text ({e})") from e
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise FlexQuantError(f"{path} holds no questions; write one a line, or pass --no-questions")
    return questions


def question_prompts(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each question, in the chat template if the tokenizer has one."""
    if not tokenizer.chat_template:
        return [tokenizer(question)["input_ids"] for question in questions]
    conversations = ([{"role": "user", "content": question}] for question in questions)
    return [document_tokens(c, tokenizer, "the questions", to_answer=True) for c in conversations]
