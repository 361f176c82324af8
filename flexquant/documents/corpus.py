# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the texts of many kinds that come with FlexQuant: to calibrate on, and to measure what was lost.

``corpus`` has a file for each kind, and one for each language but English. A line of equal signs stands
between two documents. A document whose first line begins with "User:" is a conversation. Every fourth
document of a file is held out: nothing calibrates on it, and quantising measures with it.
"""

from __future__ import annotations

import importlib.resources
import re

from flexquant.documents.texts import TextOrMessages

SEPARATOR = "\n=====\n"
HELD_OUT = 4
"""Number of documents in a row of which the last one is held out."""
LANGUAGES = "languages/"
TURN = re.compile(r"^(User|Assistant): ", re.MULTILINE)

Corpus = dict[str, list[TextOrMessages]]
"""Kind, e.g. ``prose`` or ``languages/de``, -> its documents, in the order of the file."""


def read_corpus(*, held_out: bool) -> Corpus:
    """Return the documents that are held out for measuring, or all the others, by sorted kind."""
    root = importlib.resources.files("flexquant.documents").joinpath("corpus")
    files = {file.name.removesuffix(".txt"): file for file in root.iterdir() if file.is_file()}
    of_languages = root.joinpath("languages").iterdir()
    files |= {LANGUAGES + file.name.removesuffix(".txt"): file for file in of_languages}
    corpus: Corpus = {}
    for kind in sorted(files):
        documents = files[kind].read_text(encoding="utf-8").strip("\n").split(SEPARATOR)
        corpus[kind] = [
            _parse(text) for number, text in enumerate(documents, 1) if (number % HELD_OUT == 0) == held_out
        ]
    return corpus


def _parse(text: str) -> TextOrMessages:
    """Return a document's text or, for a conversation, its messages."""
    if not text.startswith("User: "):
        return text
    _, *parts = TURN.split(text)
    roles, contents = parts[::2], parts[1::2]
    return [
        {"role": role.lower(), "content": content.strip()}
        for role, content in zip(roles, contents, strict=True)
    ]
