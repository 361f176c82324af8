# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The texts that come with FlexQuant: of many kinds, none twice, some of each held out."""

from __future__ import annotations

import pytest

from flexquant.documents.texts import Corpus, plain_text, read_corpus

KINDS = {"prose", "conversation", "instructions", "code", "tables"}
RUN = 40
"""Characters that no two documents share."""


@pytest.fixture(scope="module")
def halves() -> tuple[Corpus, Corpus]:
    return read_corpus(held_out=False), read_corpus(held_out=True)


def test_each_kind_has_documents_to_calibrate_on_and_others_to_measure_with(
    halves: tuple[Corpus, Corpus],
) -> None:
    calibrated, held_out = halves
    assert calibrated.keys() == held_out.keys() > KINDS
    languages = [kind for kind in calibrated if kind.startswith("languages/")]
    assert len(languages) >= 20
    for kind in calibrated:
        assert len(calibrated[kind]) >= 3 * len(held_out[kind]) > 0


def test_conversations_have_turns_of_both_sides(halves: tuple[Corpus, Corpus]) -> None:
    for corpus in halves:
        for document in corpus["conversation"]:
            assert isinstance(document, list)
            roles = [message["role"] for message in document]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert all(message["content"] for message in document)


def test_no_two_documents_share_a_sentence(halves: tuple[Corpus, Corpus]) -> None:
    seen: dict[str, str] = {}
    for corpus in halves:
        for kind, documents in corpus.items():
            for number, document in enumerate(documents):
                text, place = plain_text(document), f"{kind} {number}"
                for i in range(len(text) - RUN):
                    if (other := seen.setdefault(text[i : i + RUN], place)) != place:
                        pytest.fail(f"{place} and {other} share {text[i : i + RUN]!r}")
