# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose real text to calibrate on: of many kinds, about as much of each, as records of a JSONL file."""

from __future__ import annotations

from collections.abc import Container, Sequence
from random import Random

from transformers import PreTrainedTokenizerBase

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.texts import TextOrMessages, document_tokens, plain_text, read_corpus, read_documents
from flexquant.quantization.sampling import Language, is_known

PASSAGE = 1000
"""Characters after which a passage of Python's documentation ends at the end of a paragraph."""
REFERENCE = "reference"
"""The kind of Python's documentation."""


def real_text(
    tokenizer: PreTrainedTokenizerBase,
    languages: Sequence[Language],
    tokens: int,
    seed: int,
    without: Container[str] = (),
) -> list[JsonObject]:
    """Return records of real text with ``tokens`` tokens or a few more, about as many of each kind.

    It may be fewer if all that there is has fewer. The languages but English are one kind. Kinds in
    ``without`` are left out.
    """
    kinds: dict[str, list[JsonObject]] = {}
    for kind, documents in read_corpus(held_out=False).items():
        if is_known(kind, languages):
            records = [{"kind": kind, **_record(document, tokenizer)} for document in documents]
            kinds.setdefault(kind.partition("/")[0], []).extend(records)
    passages = [passage for page in read_documents(None) for passage in _passages(str(page))]
    kinds[REFERENCE] = [{"kind": REFERENCE, "text": passage} for passage in passages]
    for kind, records in kinds.items():
        Random(f"{seed}, {kind}").shuffle(records)
    used = {kind: 0 for kind in kinds if kind not in without}
    taken: list[JsonObject] = []
    while sum(used.values()) < tokens and (left := [kind for kind in used if kinds[kind]]):
        kind = min(left, key=lambda kind: used[kind])
        taken.append(kinds[kind].pop())
        used[kind] += len(record_tokens(taken[-1], tokenizer))
    return taken


def _record(document: TextOrMessages, tokenizer: PreTrainedTokenizerBase) -> JsonObject:
    """Return a document as a line of the file; without a chat template a conversation is plain text."""
    if isinstance(document, str) or not tokenizer.chat_template:
        return {"text": plain_text(document)}
    return {"messages": document}


def record_tokens(record: JsonObject, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a record."""
    return document_tokens(record.get("messages") or record["text"], tokenizer, "the calibration text")


def count_tokens(records: Sequence[JsonObject], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that the records have together."""
    return sum(len(record_tokens(record, tokenizer)) for record in records)


def _passages(page: str) -> list[str]:
    """Join a page's paragraphs into passages about as long as the model's documents."""
    passages: list[str] = []
    for paragraph in page.split("\n\n"):
        if passages and len(passages[-1]) < PASSAGE:
            passages[-1] += f"\n\n{paragraph}"
        else:
            passages.append(paragraph)
    return passages
