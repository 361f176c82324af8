# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make the rows of token ids for calibration, from text that is read or that the 16-bit model writes.

For users who have no text, the model writes half of it. Its own text resembles what it will compute on, in
its languages and its chat template. Half of its documents are answers to requests, if it has a template; the
others continue from first words, every second of them from a word of the tokenizer's vocabulary. Each
document is sampled at one of several temperatures, and left out if it repeats itself: the more often a model
does so, the less of the text is its own. The rest, half of it or more, is real text of many kinds, about as
much of each: those of ``flexquant.documents.corpus`` in English and the languages that the model knows, and
Python's documentation. The text is kept in one JSONL file, which a later run reuses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flexquant.checkpoint.folder import NOTICES, find_files
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import read_earlier, staged_file
from flexquant.checkpoint.writer import Progress
from flexquant.documents.results import digest_of
from flexquant.documents.texts import (
    SELF,
    TextOrMessages,
    as_text,
    document_tokens,
    draw_rows,
    plain_text,
    read_corpus,
    read_documents,
    start_of_row,
    tokens_needed,
)
from flexquant.errors import FlexQuantError
from flexquant.quantization.oneshot import explained_memory, load_whole, watched_layers
from flexquant.quantization.progress import Stage
from flexquant.quantization.recipe import Calibration
from flexquant.quantization.report import versions
from flexquant.quantization.sampling import (
    Language,
    draw_opening,
    draw_request,
    is_known,
    known_languages,
    sample,
    vocabulary_word,
)
from flexquant.quantization.source_model import SourceModel

FILE = "calibration.jsonl"
"""Name of the text's file beside the variants."""

TEMPERATURES = (0.6, 0.8, 1.0)
BATCH = 32
"""Documents that are written in one batch."""
RUN = 4
"""Tokens in the runs by which :func:`repeats` judges."""
DISTINCT = 0.6
"""Least share of distinct runs in a document that does not repeat itself."""
MOST_DOCUMENTS = 16
"""Largest number of documents, as a multiple of the number that would do if all had full length."""

PASSAGE = 1000
"""Characters after which a passage of Python's documentation ends at the end of a paragraph."""
REFERENCE = "reference"
"""The kind of Python's documentation."""

NAME = "the model's own text"
OTHERWISE = "give text like your users' requests with --calibration FILE"


def calibration_rows(
    settings: Calibration,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    overwrite: bool,
    progress: Callable[[str], None],
    stage: Stage,
) -> list[list[int]]:
    """Return ``settings.samples`` rows of ``settings.length`` token ids, within one ``stage``.

    With SELF the model writes the text into the folder ``output``, unless an equal run has done so. Raises
    FlexQuantError for text that cannot be read or is too short, and for a file with another text in its
    place, unless ``overwrite`` is set.
    """
    if settings.data != SELF:
        if settings.data is None:
            progress("calibrating on Python's own documentation; text like your users' gives better accuracy")
        with stage("reading the calibration text"):
            return _draw(settings.data, settings, tokenizer)
    file = output / FILE
    if find_written(file, made_with(source, settings), overwrite=overwrite):
        with stage(f"reading the calibration text that the model wrote into {file}"):
            return _draw(file, settings, tokenizer)
    with stage(f"the model writes its calibration text, {file}", unit=" tokens") as show:
        write_calibration(file, source, tokenizer, settings, show)
        return _draw(file, settings, tokenizer)


def _draw(
    data: str | Path | None, settings: Calibration, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    return draw_rows(
        read_documents(data),
        tokenizer,
        samples=settings.samples,
        length=settings.length,
        seed=settings.seed,
    )


def made_with(source: SourceModel, settings: Calibration) -> JsonObject:
    """Return what the text depends on, as the file's first record tells it under ``made_with``.

    Licences, which variants have copies of, decide nothing about it; the model's own code does.
    """
    notices = find_files(source.folder, NOTICES)
    return {
        "model": source.label,
        "weights_sha256": source.weights_sha256,
        "config_sha256": source.config_sha256,
        **{name: digest for name, digest in source.files_sha256.items() if name not in notices},
        "samples": settings.samples,
        "length": settings.length,
        "seed": settings.seed,
        "versions": versions(),
    }


def find_written(file: Path, expected: JsonObject, *, overwrite: bool) -> bool:
    """Return whether ``file`` holds the text that :func:`write_calibration` would write.

    Raises FlexQuantError for a file with other inputs or a changed text, unless ``overwrite`` is set.
    """
    advice = (
        "calibrate on it as it is with --calibration FILE, replace it with --overwrite, or choose another "
        "folder"
    )

    def read(text: str) -> tuple[JsonObject, bool]:
        first, *others = map(json.loads, text.removesuffix("\n").split("\n"))
        header = first.pop("made_with")
        if header.pop("text_sha256") != digest_of([first, *others]):
            header["text"] = "changed"
        return header, True

    try:
        return bool(
            read_earlier(
                file,
                expected,
                read,
                foreign=f"was made with different content; {advice}",
                other=f"was made with different {{}}; {advice}",
                error=FlexQuantError,
            )
        )
    except FlexQuantError:
        if overwrite:
            return False
        raise


def write_calibration(
    file: Path,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Calibration,
    progress: Progress | None = None,
) -> None:
    """Have the 16-bit model write ``file``, in the JSONL of ``flexquant.documents.texts.read_documents``.

    The text is enough for ``settings.samples`` rows of ``settings.length`` tokens; about half of it is
    real text. Equal arguments give equal text on one machine with one number of
    threads. ``progress`` is called with (tokens written, tokens to write). The file appears when it is
    complete. Raises FlexQuantError for a model that writes next to nothing, or whose activations are not
    finite.
    """
    with explained_memory("writing the calibration text"):
        model = load_whole(source)
        with watched_layers(model, None):
            records = _write_documents(model, tokenizer, source, settings, progress)
    header = {**made_with(source, settings), "text_sha256": digest_of(records)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(file) as partial:
        lines = [{**records[0], "made_with": header}, *records[1:]]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        partial.write_text(text, encoding="utf-8")


def _write_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: SourceModel,
    settings: Calibration,
    progress: Progress | None,
) -> list[JsonObject]:
    needed = tokens_needed(tokenizer, samples=settings.samples, length=settings.length)
    languages = known_languages(model, tokenizer)
    real = real_text(tokenizer, languages, needed // 2, settings.seed)
    to_write = max(needed // 2, needed - count_tokens(real, tokenizer))
    records: list[JsonObject] = []
    repeating: list[JsonObject] = []
    tokens = asked = 0
    most = MOST_DOCUMENTS * math.ceil(to_write / settings.length)
    while tokens < to_write:
        if asked >= (most if tokens else min(most, BATCH)):
            found = f"only {tokens:,} tokens" if tokens else "nothing but its end token"
            raise FlexQuantError(
                f"{source.folder} wrote {found} in {asked} documents, and {settings.samples} samples of "
                f"{settings.length} tokens need {to_write:,} beside real text; {OTHERWISE}"
            )
        size = min(BATCH, math.ceil((to_write - tokens) / settings.length) + 1)
        torch.manual_seed(Random(f"{settings.seed}, {asked}").getrandbits(63))
        for record in _write_batch(model, tokenizer, languages, range(asked, asked + size), settings):
            ids = record_tokens(record, tokenizer)
            tokens += len(ids)
            (repeating if repeats(ids) else records).append(record)
        asked += size
        if progress is not None:
            progress(min(tokens, to_write), to_write)
    missing = needed - count_tokens(records, tokenizer)
    real = real_text(tokenizer, languages, missing, settings.seed)
    if count_tokens(real, tokenizer) < missing:
        records += repeating
    return [*records, *real]


def repeats(ids: Sequence[int]) -> bool:
    """Return whether a document of token ids repeats itself, as small models do when they write."""
    runs = [tuple(ids[i : i + RUN]) for i in range(len(ids) - RUN + 1)]
    return len(set(runs)) < DISTINCT * len(runs)


def _write_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    languages: tuple[Language, ...],
    numbers: Sequence[int],
    settings: Calibration,
) -> list[JsonObject]:
    """Return the records of the documents with these numbers, without those that stayed empty."""
    draws = [Random(f"{settings.seed}, document {number}") for number in numbers]
    temperatures = [draw.choice(TEMPERATURES) for draw in draws]
    starts, prompts = [], []
    for number, draw in zip(numbers, draws, strict=True):
        if tokenizer.chat_template and number % 2 == 0:
            start: TextOrMessages = [{"role": "user", "content": draw_request(languages, draw)}]
            text = as_text(start, tokenizer, NAME, to_answer=True)
            prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            start = vocabulary_word(tokenizer, draw) if number % 4 == 1 else draw_opening(languages, draw)
            prompts.append(start_of_row(tokenizer) + tokenizer(start, add_special_tokens=False)["input_ids"])
        starts.append(start)
    written = sample(model, tokenizer, prompts, temperatures, settings.length)
    records: list[JsonObject] = []
    for start, temperature, prompt, ids in zip(starts, temperatures, prompts, written, strict=True):
        answer = str(tokenizer.decode(ids, skip_special_tokens=True))
        if not answer.strip():
            continue
        document: JsonObject = (
            {"text": tokenizer.decode([*prompt, *ids], skip_special_tokens=True)}
            if isinstance(start, str)
            else {"messages": [*start, {"role": "assistant", "content": answer}]}
        )
        records.append({**document, "temperature": temperature})
    return records


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
