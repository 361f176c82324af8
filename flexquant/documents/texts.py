# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read text for calibration or evaluation, and cut it into rows of token ids.

The corpus that comes with FlexQuant has a file for each kind of text, and one for each language but English.
A line of equal signs stands between two documents. A document whose first line begins with "User:" is a
conversation. Every fourth document of a file is held out: nothing calibrates on it, and quantising measures
with it.
"""

from __future__ import annotations

import importlib.resources
import os
import random
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, NoReturn

from flexquant.documents import parse_json
from flexquant.errors import FlexQuantError, explained, said_by

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextOrMessages = str | list[dict[str, str]]

# Read this many times the tokens that are needed, and draw rows from them: a corpus can be large.
POOL = 8

SELF = "self"
"""Name of the calibration data of which the model itself writes half."""

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
SEPARATOR = "\n=====\n"
HELD_OUT = 4
"""Number of documents in a row of which the last one is held out."""
LANGUAGES = "languages/"
TEMPLATE_SECONDS = 10
TURN = re.compile(r"^(User|Assistant): ", re.MULTILINE)

Corpus = dict[str, list[TextOrMessages]]
"""Kind, e.g. ``prose`` or ``languages/de``, -> its documents, in the order of the file."""


def read_documents(source: str | Path | None) -> Iterator[TextOrMessages]:
    """Yield the documents of a text file, a ``.jsonl`` file, a folder of such files or a dataset id.

    A text file is one document; so is the ``messages`` or ``text`` of each JSONL line or dataset record. None
    gives the language reference that CPython ships, so that a first try needs no download. Raises
    FlexQuantError for a source that cannot be read.
    """
    if source is None:
        from pydoc_data.topics import topics

        return iter([topics[name] for name in sorted(topics)])
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in TEXT_SUFFIXES and f.is_file())
        if not files:
            problem = f"the folder {path} has no {', '.join(TEXT_SUFFIXES)} file"
            raise FlexQuantError(f"{problem}; put text into it, or name a file or a dataset id")
        return chain.from_iterable(map(_read_file, files))
    if path.is_file():
        return _read_file(path)
    if path.suffix in TEXT_SUFFIXES:
        raise FlexQuantError(f"there is no file {source}; give a file, a folder of them or a dataset id")
    return _read_dataset(str(source))


def draw_rows(
    documents: Iterable[TextOrMessages],
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    length: int,
    seed: int,
    name: str = "the calibration data",
) -> list[list[int]]:
    """Return ``samples`` rows of ``length`` token ids each, drawn without repetition.

    Documents are joined with the end-of-text token; each row starts with the begin-of-text token if the
    tokenizer adds one. Equal arguments give equal rows. Raises FlexQuantError, which calls the documents
    ``name``, if there is not enough text.
    """
    needed = tokens_needed(tokenizer, samples=samples, length=length)
    start = start_of_row(tokenizer)
    body = length - len(start)
    tokens: list[int] = []
    for document in documents:
        ids = document_tokens(document, tokenizer, name)
        if tokens and ids and tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        tokens += ids
        if len(tokens) >= POOL * needed:
            break
    if not tokens:
        raise FlexQuantError(f"{name} has no text; give text like your users' requests")
    if len(tokens) < needed:
        found = f"{name} has {len(tokens):,} tokens, but {samples} samples of {length} tokens need {needed:,}"
        raise FlexQuantError(f"{found}; give more text, or lower the samples or their length")
    chosen = random.Random(seed).sample(range(0, len(tokens) - body + 1, body), samples)
    return [start + tokens[i : i + body] for i in chosen]


def tokens_needed(tokenizer: PreTrainedTokenizerBase, *, samples: int, length: int) -> int:
    """Return the tokens of text that :func:`draw_rows` needs; raise FlexQuantError for empty samples."""
    if samples < 1 or length < 2:
        problem = f"calibration takes at least 1 sample of 2 tokens, not {samples} of {length}"
        raise FlexQuantError(f"{problem}; the defaults are 128 of 512")
    return samples * (length - len(start_of_row(tokenizer)))


def document_tokens(
    document: TextOrMessages, tokenizer: PreTrainedTokenizerBase, name: str, to_answer: bool = False
) -> list[int]:
    """Return the token ids of a document, a conversation by the template; raise if that refuses it."""
    text = _as_text(document, tokenizer, name, to_answer)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def start_of_row(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the begin-of-text token if the tokenizer adds one, else nothing."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else []


def _as_text(document: TextOrMessages, tokenizer: PreTrainedTokenizerBase, name: str, to_answer: bool) -> str:
    if isinstance(document, str):
        return document
    if not tokenizer.chat_template:
        problem = f"{name} has 'messages', but the model's tokenizer has no chat template"
        raise FlexQuantError(f"{problem}; give records with 'text'")
    try:
        with _stopped_after(TEMPLATE_SECONDS):
            render = partial(tokenizer.apply_chat_template, tokenize=False)
            return str(render(document, add_generation_prompt=to_answer))
    except Exception as e:  # a template is a program by the model's author, and can raise anything
        raise FlexQuantError(f"the model's chat template refuses messages of {name} ({said_by(e)})") from e


@contextmanager
def _stopped_after(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block when it takes longer; only the main thread can be stopped."""
    if current_thread() is not main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def plain_text(document: TextOrMessages) -> str:
    """Return a document's text; in a conversation the speakers are named, as without a chat template."""
    if isinstance(document, str):
        return document
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in document)


def _read_file(path: Path) -> Iterator[TextOrMessages]:
    """Yield the text of a file or, line by line, the records of a ``.jsonl`` file."""
    with explained(f"cannot read {path} as UTF-8 text", "save it as UTF-8"), path.open(encoding="utf-8") as f:
        if path.suffix != ".jsonl":
            yield f.read()
            return
        for number, line in enumerate(f, 1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    record = parse_json(line)
                except ValueError as e:
                    raise FlexQuantError(f"{where} is not JSON ({e})") from e
                yield _text_of(record, where)


def _read_dataset(name: str) -> Iterator[TextOrMessages]:
    from datasets import load_dataset

    with explained(
        f"'{name}' is neither a file nor a Hugging Face dataset that could be read",
        "give a text file, a .jsonl file, a folder of them or a dataset id",
        (OSError, ValueError, RuntimeError),  # the last one for a dataset that is a script
    ):
        splits = load_dataset(name, streaming=True)
        records = splits["train"] if "train" in splits else next(iter(splits.values()), ())
        for number, record in enumerate(records, 1):
            yield _text_of(record, f"{name}, record {number}")


def _text_of(record: object, where: str) -> TextOrMessages:
    if isinstance(record, Mapping):
        messages, text = record.get("messages"), record.get("text")
        if isinstance(messages, list) and messages and all(isinstance(m, Mapping) for m in messages):
            return [dict(m) for m in messages]
        if isinstance(text, str):
            return text
    found = ", ".join(f"'{key}'" for key in record) if isinstance(record, Mapping) else type(record).__name__
    raise FlexQuantError(f"{where} has {found or 'no keys'}; expected 'text' or a list of 'messages'")


def read_corpus(*, held_out: bool) -> Corpus:
    """Return the documents that are held out for measuring, or all the others, by sorted kind."""
    root = importlib.resources.files("flexquant.documents").joinpath("corpus")
    files = {file.name.removesuffix(".txt"): file for file in root.iterdir() if file.is_file()}
    of_languages = root.joinpath("languages").iterdir()
    files |= {LANGUAGES + file.name.removesuffix(".txt"): file for file in of_languages}
    corpus: Corpus = {}
    for kind in sorted(files):
        documents = files[kind].read_text(encoding="utf-8").strip("\n").split(SEPARATOR)
        numbered = enumerate(documents, 1)
        corpus[kind] = [_parse(text) for i, text in numbered if (i % HELD_OUT == 0) == held_out]
    return corpus


def _parse(text: str) -> TextOrMessages:
    """Return a document's text or, for a conversation, its messages."""
    if not text.startswith("User: "):
        return text
    _, *parts = TURN.split(text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": role.lower(), "content": content.strip()} for role, content in turns]
