# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make the rows of token ids for calibration, from text that is read or that the 16-bit model writes.

For users who have no text, the model writes half of it, in its languages and its chat template: answers to
requests, and continuations of first words, at several temperatures, without documents that repeat themselves.
The rest is real text, about as much of each kind: of ``flexquant.documents.corpus``, in English and the
languages that the model knows, and Python's documentation.
"""

import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypedDict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flexquant.checkpoint.folder import NOTICES, find_files
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import read_earlier, write_text
from flexquant.checkpoint.writer import Progress
from flexquant.documents import parse_json, texts
from flexquant.documents.results import digest_of
from flexquant.errors import FlexQuantError
from flexquant.quantization import sampling
from flexquant.quantization.oneshot import explained_memory, load_whole, watched_layers
from flexquant.quantization.progress import Stage
from flexquant.quantization.recipe import Calibration
from flexquant.quantization.report import versions
from flexquant.quantization.source_model import SourceModel

TEMPERATURES = (0.6, 0.8, 1.0)
BATCH = 32
"""Documents that are written in one batch."""
RUN = 4
"""Tokens in the runs by which :func:`_repeats` judges."""
DISTINCT = 0.6
"""Least share of distinct runs in a document that does not repeat itself."""
MOST_DOCUMENTS = 16
"""Largest number of documents, as a multiple of the number that would do if all had full length."""
PASSAGE = 1000
"""Characters after which a passage of Python's documentation ends at the end of a paragraph."""


class Record(TypedDict, total=False):
    """A line of the calibration text: ``text``, or the ``messages`` of a conversation."""

    kind: str
    """What the text is, if the model did not write it."""
    text: str
    messages: list[dict[str, str]]
    temperature: float
    """The temperature at which the model wrote it."""


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

    With SELF the model writes the text into the folder ``output``, unless an equal run has done so; equal
    arguments give equal text on one machine with one number of threads. Raises FlexQuantError for text that
    cannot be read or is too short, for a file with another text in its place, unless ``overwrite`` is set,
    and for a model that writes next to nothing, or whose activations are not finite.
    """
    file = output / "calibration.jsonl"
    by_model = settings.data == texts.SELF
    to_write = by_model and not _is_written(file, _made_with(source, settings), overwrite)
    title = "reading the calibration text"
    if to_write:
        title = f"the model writes its calibration text, {file}"
    elif by_model:
        title += f" that the model wrote into {file}"
    elif settings.data is None:
        progress("calibrating on Python's own documentation; text like your users' gives better accuracy")
    with stage(title, unit=" tokens" if to_write else "") as show:
        if to_write:
            _write(file, source, tokenizer, settings, show)
        documents = texts.read_documents(file if by_model else settings.data)
        return texts.draw_rows(documents, tokenizer, **settings.model_dump(exclude={"data"}))


def _made_with(source: SourceModel, settings: Calibration) -> JsonObject:
    """Return what the text depends on, as the file's first record tells it under ``made_with``.

    Licences, which variants have copies of, decide nothing about it; the model's own code does.
    """
    notices = find_files(source.folder, NOTICES)
    return {
        "weights_sha256": source.weights_sha256,
        "config_sha256": source.config_sha256,
        **{name: digest for name, digest in source.files_sha256.items() if name not in notices},
        **settings.model_dump(exclude={"data"}),
        "versions": versions(),
        "python": platform.python_version(),
    }


def _is_written(file: Path, expected: JsonObject, overwrite: bool) -> bool:
    """Whether ``file`` holds what :func:`_write` would; raise FlexQuantError for a file to be kept."""
    advice = "calibrate on it as it is with --calibration FILE, replace it with --overwrite"
    refusal = "was made with different {}; " + advice + ", or choose another folder"

    def read(text: str) -> tuple[JsonObject, bool]:
        first, *others = map(parse_json, text.removesuffix("\n").split("\n"))
        header = first.pop("made_with")
        header.pop("model", None)  # its label, in files of before
        if header.pop("text_sha256") != digest_of([first, *others]):
            header["text"] = "changed"
        return header, True

    foreign = refusal.format("content")
    try:
        return bool(read_earlier(file, expected, read, foreign=foreign, other=refusal, error=FlexQuantError))
    except FlexQuantError:
        if not overwrite:
            raise
        return False


def _write(
    file: Path,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Calibration,
    progress: Progress | None,
) -> None:
    """Have the 16-bit model write ``file``, in the JSONL of ``flexquant.documents.texts.read_documents``."""
    with explained_memory("writing the calibration text"):
        model = load_whole(source)
        with watched_layers(model, None):
            author = _Author(model, tokenizer, settings, sampling.known_languages(model, tokenizer))
            records = author.write(str(source.folder), progress)
    header = {**_made_with(source, settings), "text_sha256": digest_of(records)}
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [{**records[0], "made_with": header}, *records[1:]]
    write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _repeats(ids: Sequence[int]) -> bool:
    """Return whether a document of token ids repeats itself, as small models do when they write."""
    runs = [tuple(ids[i : i + RUN]) for i in range(len(ids) - RUN + 1)]
    return len(set(runs)) < DISTINCT * len(runs)


@dataclass(frozen=True)
class _Author:
    """The 16-bit model as the author of calibration text, with real text beside its own."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: Calibration
    languages: Sequence[sampling.Language]

    def write(self, name: str, progress: Progress | None) -> list[Record]:
        """Return enough records; ``name`` is the model's, for the FlexQuantError if it writes too little."""
        samples, length = self.settings.samples, self.settings.length
        needed = texts.tokens_needed(self.tokenizer, samples=samples, length=length)
        to_write = max(needed // 2, needed - self._count_tokens(self._real_text(needed // 2)))
        records: list[Record] = []
        repeating: list[Record] = []
        tokens = asked = 0
        most = MOST_DOCUMENTS * math.ceil(to_write / length)
        while tokens < to_write:
            if asked >= (most if tokens else min(most, BATCH)):
                found = f"only {tokens:,} tokens" if tokens else "nothing but its end token"
                needs = f"{samples} samples of {length} tokens need {to_write:,} beside real text"
                advice = "give text like your users' requests with --calibration FILE"
                raise FlexQuantError(f"{name} wrote {found} in {asked} documents, and {needs}; {advice}")
            size = min(BATCH, math.ceil((to_write - tokens) / length) + 1)
            torch.manual_seed(Random(f"{self.settings.seed}, {asked}").getrandbits(63))
            for record in self._write_batch(range(asked, asked + size)):
                ids = self._tokens(record)
                tokens += len(ids)
                (repeating if _repeats(ids) else records).append(record)
            asked += size
            if progress is not None:
                progress(min(tokens, to_write), to_write)
        missing = needed - self._count_tokens(records)
        real = self._real_text(missing)
        if self._count_tokens(real) < missing:
            records += repeating
        return [*records, *real]

    def _write_batch(self, numbers: Sequence[int]) -> list[Record]:
        """Return the records of the documents with these numbers, without those that stayed empty."""
        tokenizer = self.tokenizer
        draws = [Random(f"{self.settings.seed}, document {number}") for number in numbers]
        temperatures = [draw.choice(TEMPERATURES) for draw in draws]
        starts, prompts = [], []
        for number, draw in zip(numbers, draws, strict=True):
            if tokenizer.chat_template and number % 2 == 0:
                request = draw.choice(draw.choice(self.languages).requests)
                request = request.replace("{}", draw.choice(sampling.TOPICS))
                start: texts.TextOrMessages = [{"role": "user", "content": request}]
                prompt = texts.document_tokens(start, tokenizer, "the model's own text", to_answer=True)
            else:
                openings = () if number % 4 == 1 else draw.choice(self.languages).openings
                start = draw.choice(openings) if openings else sampling.vocabulary_word(tokenizer, draw)
                ids = tokenizer(start, add_special_tokens=False)["input_ids"]
                prompt = texts.start_of_row(tokenizer) + ids
            prompts.append(prompt)
            starts.append(start)
        written = sampling.sample(self.model, tokenizer, prompts, temperatures, self.settings.length)
        records: list[Record] = []
        for start, temperature, prompt, ids in zip(starts, temperatures, prompts, written, strict=True):
            answer = str(tokenizer.decode(ids, skip_special_tokens=True))
            if not answer.strip():
                continue
            if isinstance(start, str):
                document: Record = {"text": str(tokenizer.decode([*prompt, *ids], skip_special_tokens=True))}
            else:
                document = {"messages": [*start, {"role": "assistant", "content": answer}]}
            records.append({**document, "temperature": temperature})
        return records

    def _real_text(self, tokens: int) -> list[Record]:
        """Return up to about ``tokens`` tokens of real text, equal for each kind (languages: one kind)."""
        kinds: dict[str, list[Record]] = {}
        corpus = texts.read_corpus(held_out=False)
        for kind, document in sampling.known_documents(corpus, self.languages, self.tokenizer):
            record: Record = {"kind": kind}
            record |= {"text": document} if isinstance(document, str) else {"messages": document}
            kinds.setdefault(kind.partition("/")[0], []).append(record)
        passages = [passage for page in texts.read_documents(None) for passage in _passages(str(page))]
        kinds["reference"] = [{"kind": "reference", "text": passage} for passage in passages]
        for kind, records in kinds.items():
            Random(f"{self.settings.seed}, {kind}").shuffle(records)
        used = dict.fromkeys(kinds, 0)
        taken: list[Record] = []
        while sum(used.values()) < tokens and (left := [kind for kind in used if kinds[kind]]):
            kind = min(left, key=lambda kind: used[kind])
            taken.append(kinds[kind].pop())
            used[kind] += len(self._tokens(taken[-1]))
        return taken

    def _tokens(self, record: Record) -> list[int]:
        document = record.get("messages") or record["text"]
        return texts.document_tokens(document, self.tokenizer, "the calibration text")

    def _count_tokens(self, records: Sequence[Record]) -> int:
        return sum(len(self._tokens(record)) for record in records)


def _passages(page: str) -> list[str]:
    """Join a page's paragraphs into passages about as long as the model's documents."""
    passages: list[str] = []
    for paragraph in page.split("\n\n"):
        if passages and len(passages[-1]) < PASSAGE:
            passages[-1] += f"\n\n{paragraph}"
        else:
            passages.append(paragraph)
    return passages
