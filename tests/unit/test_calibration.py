# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Calibration data is read, rendered and cut as documented; the texts that come along are of many kinds."""

import itertools
import json

import pytest

from flexquant.documents import texts
from flexquant.documents.texts import Corpus, document_tokens, draw_rows, read_corpus, read_documents
from flexquant.errors import FlexQuantError
from tests.checkpoints import base_config, byte_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
EOS = 257


@pytest.fixture
def tokenizer():
    return byte_tokenizer(base_config())


PROSE = "one paragraph\n\nanother, with umlauts: äöü\n"
MESSAGES = [{"role": "user", "content": "hi"}]
CONVERSATION = json.dumps({"messages": MESSAGES, "id": 3})
ODD_ENDS = "one\u2028two\u2029three\x85four"
"""Characters at which str.splitlines() cuts, but JSON does not end a string and a file no line."""


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("prose.txt", PROSE, [PROSE]),
        ("data.jsonl", f'{{"text": "plain"}}\n\n{CONVERSATION}', ["plain", MESSAGES]),
        ("data.jsonl", f'{{"text": "{ODD_ENDS}"}}\r\n{{"text": "b"}}', [ODD_ENDS, "b"]),
    ],
    ids=["text is one document", "text and messages", "a record ends at a newline alone"],
)
def test_documents_of_a_file(tmp_path, name, content, documents):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert list(read_documents(tmp_path / name)) == documents


def test_a_jsonl_file_is_read_as_far_as_it_is_needed(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "first"}\n' * 100_000 + b"\xff\n")
    documents = read_documents(file)
    assert next(documents) == "first"
    with pytest.raises(FlexQuantError, match="as UTF-8 text"):
        list(documents)


def test_default_needs_no_download_and_is_enough_for_the_default_samples(tokenizer):
    rows = draw_rows(read_documents(None), tokenizer, samples=128, length=512, seed=0)
    assert (len(rows), {len(row) for row in rows}) == (128, {512})


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("data.jsonl", b'{"text": "a"}\n{broken', r"line 2 is not JSON"),
        ("data.jsonl", b'{"prompt": "a", "answer": "b"}', r"line 1 has 'prompt', 'answer'; expected 'text'"),
        ("data.jsonl", b'{"messages": []}', r"line 1 has 'messages'; expected"),
        ("data.jsonl", b'["a"]', r"line 1 has list; expected"),
        ("data.jsonl", b"{}", r"line 1 has no keys"),
        ("data.txt", b"\xff\xfe\x00binary", "UTF-8"),
        ("picture.png", b"", r"has no \.txt, \.md, \.jsonl file; put text into it"),
    ],
)
def test_files_that_hold_no_documents(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FlexQuantError, match=expected):
        list(read_documents(tmp_path if name == "picture.png" else tmp_path / name))


@pytest.mark.parametrize("name", ["texts.txt", "of/texts.jsonl"])
def test_a_file_that_is_missing_is_not_looked_for_on_the_hub(name):
    with pytest.raises(FlexQuantError, match=f"there is no file {name}; give a file"):
        read_documents(name)


def test_a_folder_gives_its_text_files_by_name(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n{"text": "third"}\n')
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.txt").write_text("fourth")
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00binary")
    (tmp_path / "d.txt").mkdir()
    assert list(read_documents(tmp_path)) == ["first", "second", "third", "fourth"]


def test_rows_cover_the_text_without_repetition_and_separate_documents(tokenizer):
    rows = draw_rows(["abcdefghij" * 2 + "klmnopqrst" * 2], tokenizer, samples=4, length=10, seed=0)
    assert sorted(tokenizer.decode(row) for row in rows) == ["abcdefghij"] * 2 + ["klmnopqrst"] * 2
    (row,) = draw_rows(["ab", "", "cd"], tokenizer, samples=1, length=5, seed=0)
    assert row == [*tokenizer("ab")["input_ids"], EOS, *tokenizer("cd")["input_ids"]]


def test_rows_start_with_the_token_that_the_tokenizer_adds():
    class WithStart:
        bos_token_id, eos_token_id, chat_template = 1, 2, None

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}

    rows = draw_rows(["abcdef"], WithStart(), samples=2, length=4, seed=0)
    assert sorted(rows) == [[1, 97, 98, 99], [1, 100, 101, 102]]


def test_the_seed_chooses_the_rows(tokenizer):
    text = "".join(chr(33 + i % 90) for i in range(4000))

    def rows(seed: int) -> list[list[int]]:
        return draw_rows([text], tokenizer, samples=8, length=64, seed=seed)

    assert rows(0) == rows(0) and rows(0) != rows(1)


def test_rows_are_drawn_from_more_text_than_they_need_and_not_from_all(tokenizer):
    endless = (chr(character) * 15 for character in itertools.cycle(range(33, 127)))
    rows = draw_rows(endless, tokenizer, samples=2, length=16, seed=0)
    assert len(rows) == 2 and max(ord(tokenizer.decode(row[:1])) for row in rows) > 34


def test_messages_take_the_chat_template(tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "ho"}]
    with pytest.raises(FlexQuantError, match="no chat template"):
        draw_rows([messages], tokenizer, samples=1, length=4, seed=0)
    tokenizer.chat_template = TEMPLATE
    rows = draw_rows([messages], tokenizer, samples=1, length=21, seed=0)
    assert tokenizer.decode(rows[0]) == "[user]hi[assistant]ho"


@pytest.mark.parametrize(
    ("documents", "samples", "length", "expected"),
    [
        (["too short"], 4, 512, "has 9 tokens, but 4 samples of 512 tokens need 2,048"),
        ([], 4, 512, "the calibration data has no text; give text like"),
        ([""], 4, 512, "the calibration data has no text; give text like"),
        (["text"], 0, 512, "at least 1 sample of 2 tokens"),
        (["text"], -1, 512, "at least 1 sample of 2 tokens"),
        (["text"], 4, 1, "at least 1 sample of 2 tokens"),
        ([MESSAGES], 1, 4, "refuses messages of the calibration data .*must alternate"),
    ],
)
def test_what_gives_no_rows_is_told(tokenizer, documents, samples, length, expected):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(FlexQuantError, match=expected):
        draw_rows(documents, tokenizer, samples=samples, length=length, seed=0)


def test_a_template_that_does_not_end_is_stopped(tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "TEMPLATE_SECONDS", 1)
    tokenizer.chat_template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for _ in range(2):
        with pytest.raises(FlexQuantError, match=r"refuses messages of text \(it takes more than 1 s\)"):
            document_tokens(MESSAGES, tokenizer, "text")
    tokenizer.chat_template = TEMPLATE
    assert document_tokens(MESSAGES, tokenizer, "text")


KINDS = {"prose", "conversation", "instructions", "code", "tables"}
RUN = 40
"""Characters that no two documents share."""


@pytest.fixture(scope="module")
def halves() -> tuple[Corpus, Corpus]:
    return read_corpus(held_out=False), read_corpus(held_out=True)


def test_each_kind_has_documents_to_calibrate_on_and_others_to_measure_with(halves):
    calibrated, held_out = halves
    assert calibrated.keys() == held_out.keys() > KINDS
    assert len([kind for kind in calibrated if kind.startswith("languages/")]) >= 20
    for kind in calibrated:
        assert len(calibrated[kind]) >= 3 * len(held_out[kind]) > 0


def test_conversations_have_turns_of_both_sides(halves):
    for corpus in halves:
        for document in corpus["conversation"]:
            assert isinstance(document, list)
            roles = [message["role"] for message in document]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert all(message["content"] for message in document)


def test_no_two_documents_share_a_sentence(halves):
    seen: dict[str, str] = {}
    for corpus in halves:
        for kind, documents in corpus.items():
            for number, document in enumerate(documents):
                text, place = texts.plain_text(document), f"{kind} {number}"
                for i in range(len(text) - RUN):
                    if (other := seen.setdefault(text[i : i + RUN], place)) != place:
                        pytest.fail(f"{place} and {other} share {text[i : i + RUN]!r}")
