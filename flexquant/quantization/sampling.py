# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Tell which languages a 16-bit model knows, and let it continue prompts, each at a temperature of its own.

openings.yaml holds requests and first words of texts, for English and the languages that a model may know.
"""

import importlib.resources
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import cast

import torch
import yaml
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.texts import LANGUAGES, Corpus, TextOrMessages, plain_text, start_of_row

KNOWN = 1.6
"""Largest ratio of a sentence's nats to those in the model's best language at which a language is known."""
VOCABULARY_TRIES = 100


@dataclass(frozen=True, eq=False)
class Language:
    """A language that a model may know."""

    code: str
    """Code by ISO 639-1, e.g. ``de``."""
    sentence: str
    """It has the same meaning in every language: about as likely in all that a model knows."""
    requests: Sequence[str]
    """Questions of users; ``{}`` stands for one of TOPICS."""
    openings: Sequence[str]
    """First words of texts."""


_DATA: JsonObject = yaml.safe_load(
    importlib.resources.files("flexquant.quantization").joinpath("openings.yaml").read_text("utf-8")
)
TOPICS: Sequence[str] = _DATA["topics"]
ENGLISH, *OTHERS = (Language(**entry) for entry in _DATA["languages"])


class RowTemperatures(LogitsProcessor):
    """Divides the logits [rows, vocabulary] of every row by its own temperature."""

    def __init__(self, temperatures: Sequence[float]) -> None:
        self._temperatures = torch.tensor(temperatures)[:, None]

    def __call__(self, input_ids: torch.Tensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores.div_(self._temperatures.to(scores.device))
        return scores


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    tokens: int,
) -> list[list[int]]:
    """Return the model's continuation of each prompt: at most ``tokens`` ids, without the end token.

    Of the model's own generation settings, only the end tokens are used. torch's seed makes it repeatable.
    """
    ends = end_tokens(model, tokenizer)
    longest = max(map(len, prompts))
    room = getattr(model.config, "max_position_embeddings", None)
    most = tokens if room is None else max(1, min(tokens, room - longest))
    padding = ends[0] if ends else 0
    ids = [[padding] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    as_the_model_says = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    stop = {"max_new_tokens": most, "eos_token_id": ends or None, "pad_token_id": padding}
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    output = generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=GenerationConfig(do_sample=True, **as_the_model_says, **stop),
        logits_processor=LogitsProcessorList([RowTemperatures(temperatures)]),
    )
    rows = output[:, longest:].tolist()
    return [list(itertools.takewhile(lambda token: token not in ends, row)) for row in rows]


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the end tokens in the model's generation settings and its tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    return list(dict.fromkeys(e for e in (*listed, tokenizer.eos_token_id) if e is not None))


@torch.inference_mode()
def known_languages(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Language, ...]:
    """Return English, and the other languages in which the model finds one sentence about as likely."""
    nats = {}
    for language in (ENGLISH, *OTHERS):
        ids = start_of_row(tokenizer) + tokenizer(language.sentence, add_special_tokens=False)["input_ids"]
        row = torch.tensor([ids], device=model.device)
        logits = model(row).logits[0, :-1].float().log_softmax(-1)  # [tokens - 1, vocabulary]
        nats[language] = -float(logits.gather(1, row[0, 1:, None].to(logits.device)).sum())
    least = min(nats.values())
    return (ENGLISH, *(language for language in OTHERS if nats[language] <= KNOWN * least))


def known_documents(
    corpus: Corpus, languages: Sequence[Language], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, TextOrMessages]]:
    """Yield kind and document of what is in one of the languages; plain text without a chat template."""
    for kind, documents in corpus.items():
        code = kind.removeprefix(LANGUAGES)
        if code == kind or any(code == language.code for language in languages):
            for document in documents:
                yield kind, document if tokenizer.chat_template else plain_text(document)


def vocabulary_word(tokenizer: PreTrainedTokenizerBase, draw: Random) -> str:
    """Return a random token that is a word or a word's beginning; the first opening if tries run out."""
    for _ in range(VOCABULARY_TRIES):
        word = str(tokenizer.decode([draw.randrange(len(tokenizer))], skip_special_tokens=True)).strip()
        if len(word) > 1 and word.isalpha():
            return word
    return ENGLISH.openings[0]
