# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Text that the model writes to be calibrated on: how it is sampled, what is in it, and that it is kept."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.documents.texts import SELF, plain_text, read_corpus
from flexquant.errors import FlexQuantError
from flexquant.quantization.calibration import _made_with, calibration_rows
from flexquant.quantization.progress import no_stage
from flexquant.quantization.recipe import Calibration, load_recipe
from flexquant.quantization.sampling import ENGLISH, end_tokens, known_languages, sample, vocabulary_word
from flexquant.quantization.source_model import read_source
from tests.checkpoints import StateDict, make_checkpoint
from tests.keys import assert_whole
from tests.publishers import edits
from tests.quantize.quantizing import FEW, RTN, W4A16, digests, quantize, recipe, recorder, report

BY = recipe(w4a16=W4A16)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def write(model: Path, output: Path, overwrite: bool = False, **settings: int) -> list[dict[str, Any]]:
    """Have the model write its text, as a recipe would, and return the file's records."""
    by, tokenizer = Calibration(data=SELF, **{**FEW, **settings}), AutoTokenizer.from_pretrained(model)
    calibration_rows(by, read_source(model), tokenizer, output, overwrite, lambda message: None, no_stage)
    return records(output)


def records(output: Path) -> list[dict[str, Any]]:
    """Return the file's records; ``splitlines`` may take characters of a model's text for line ends."""
    lines = (output / "calibration.jsonl").read_text().removesuffix("\n").split("\n")
    return [json.loads(line) for line in lines]


def written(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of what the model wrote."""
    return [record for record in found if "temperature" in record]


@pytest.fixture(scope="module")
def first_run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("first") / "variants"
    quantize(small, output, BY, calibration="self")
    return output


def test_half_of_it_is_conversations_where_there_is_a_chat_template(own: Path, tmp_path: Path) -> None:
    (own / "chat_template.jinja").write_text(TEMPLATE)
    found = written(write(own, tmp_path / "variants"))
    conversations = [record["messages"] for record in found if "messages" in record]
    assert abs(len(found) - 2 * len(conversations)) <= 1
    for user, assistant in conversations:
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert len(user["content"]) > 5 and assistant["content"].strip()
    assert len({record["temperature"] for record in found}) > 1


def test_half_of_the_text_is_real_and_of_many_kinds(small: Path, tmp_path: Path) -> None:
    found = write(small, tmp_path / "variants", samples=64, length=256)
    by_model, others = written(found), found[len(written(found)) :]
    assert found[: len(by_model)] == by_model
    tokenizer = AutoTokenizer.from_pretrained(small)
    sizes: Counter[str] = Counter()
    for record in others:
        sizes[record["kind"].partition("/")[0]] += len(tokenizer(record["text"])["input_ids"])
    assert {"prose", "code", "conversation", "languages", "reference"} <= sizes.keys()
    assert max(sizes.values()) <= 3 * min(sizes.values())
    assert 64 * 256 / 2 <= sum(sizes.values()) < 64 * 256 * 0.75
    held_out = {plain_text(one) for documents in read_corpus(held_out=True).values() for one in documents}
    assert not held_out & {record["text"] for record in others}
    passages = [record["text"] for record in others if record["kind"] == "reference"]
    assert all(any(passage in page for page in topics.values()) for passage in passages)


def test_what_repeats_itself_gives_way_to_real_text(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, transform=says_one_thing)
    found = write(model, tmp_path / "variants", samples=8, length=128)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert not written(found)
    assert sum(len(tokenizer(record["text"])["input_ids"]) for record in found) >= 8 * 128


def says_one_thing(state: StateDict) -> StateDict:
    """Make one token far likelier than all others, everywhere."""
    state = ends_with(0)(state)
    state["lm_head.weight"][100, 0] = 100
    return state


def test_without_a_chat_template_all_of_it_is_plain_text(finished: Path) -> None:
    found = records(finished)
    header = found[0]["made_with"]
    assert all(record["text"].strip() and "messages" not in record for record in found)
    assert (header["samples"], header["length"], header["seed"]) == (4, 64, 0)


def test_a_model_without_an_end_token_writes_text(own: Path, tmp_path: Path) -> None:
    edits.config(eos_token_id=None)(own)
    edits.tokenizer_config(eos_token=None)(own)
    assert AutoTokenizer.from_pretrained(own).eos_token_id is None
    assert written(write(own, tmp_path / "variants"))


def test_equal_seeds_give_equal_text_in_any_folder_and_other_seeds_other_text(small, finished, tmp_path):
    assert write(small, tmp_path / "again") == records(finished)
    assert digests(tmp_path / "again").items() <= digests(finished).items()
    assert write(small, tmp_path / "other", seed=1)[1:] != records(finished)[1:]
    before, renamed = records(finished), shutil.copytree(small, tmp_path / "renamed")
    assert write(renamed, finished) == before


def test_report_and_recipe_name_it_and_it_can_be_named_as_a_file(small, finished, tmp_path):
    calibration = report(finished / "w4a16")["calibration"]
    assert calibration["data"] == "self" and len(calibration["rows_sha256"]) == 64
    resolved = finished / "w4a16/recipe.yaml"
    assert yaml.safe_load(resolved.read_text())["calibration"]["data"] == "self"
    quantize(small, tmp_path / "again", load_recipe(resolved))
    assert report(tmp_path / "again/w4a16")["calibration"] == calibration
    quantize(small, tmp_path / "other", BY, calibration=finished / "calibration.jsonl")
    assert report(tmp_path / "other/w4a16")["calibration"] == {**calibration, "data": "calibration.jsonl"}


def test_a_later_run_takes_the_same_text(small: Path, finished: Path) -> None:
    file, titles, two = finished / "calibration.jsonl", list[str](), recipe(w8a8=RTN, w4a16=W4A16)
    expected, written = digests(finished), file.stat().st_mtime_ns
    results = quantize(small, finished, two, calibration="self", resume=True, stage=recorder(titles))
    assert [result.kept for result in results] == [False, True]
    assert f"reading the calibration text that the model wrote into {file}" in titles
    assert file.stat().st_mtime_ns == written
    assert expected.items() <= digests(finished).items()


def test_an_interrupted_writing_begins_anew(small: Path, finished: Path, tmp_path: Path) -> None:
    (output := tmp_path / "interrupted").mkdir()
    (left := output / ".calibration.jsonl.flexquant-new-ab12").write_text('{"text": "half')
    os.utime(left, times=(0, 0))
    assert write(small, output) == records(finished)
    assert [path.name for path in output.iterdir()] == ["calibration.jsonl"]


def test_text_made_otherwise_or_changed_is_replaced_only_when_told_to(small: Path, finished: Path) -> None:
    file, expected = finished / "calibration.jsonl", digests(finished)
    for content, seed, named in (
        (file.read_text(), 1, r"seed; .*--overwrite"),
        (file.read_text() + '{"text": "mine"}\n', 0, "text; .*--overwrite"),
        ("not JSON\n", 0, "content"),
    ):
        file.write_text(content)
        with pytest.raises(FlexQuantError, match=f"calibration.jsonl was made with different {named}"):
            write(small, finished, seed=seed)
    write(small, finished, overwrite=True)
    assert digests(finished) == expected


def test_licences_decide_nothing_about_the_text_but_code_and_chat_template_do(own, finished):
    file = finished / "calibration.jsonl"
    text, time = records(finished), file.stat().st_mtime_ns
    for name in ("LICENSE", "NOTICE"):
        (own / name).write_text("by somebody")
    assert write(own, finished) == text and file.stat().st_mtime_ns == time
    for name, content in {"modeling_own.py": "", "chat_template.jinja": TEMPLATE}.items():
        (own / name).write_text(content)
        with pytest.raises(FlexQuantError, match=rf"jsonl was made with different {name}; .*--over"):
            write(own, finished)
        found = write(own, finished, overwrite=True)
    assert any("messages" in record for record in found)


def test_a_recipe_without_calibration_writes_nothing(small: Path, tmp_path: Path) -> None:
    quantize(small, tmp_path / "variants", recipe(w8a8=RTN), calibration="self")
    assert [path.name for path in (tmp_path / "variants").iterdir()] == ["w8a8"]


def ends_with(weight: float) -> Callable[[StateDict], StateDict]:
    """Return a change to a model that makes the end token that much likelier than all others, everywhere."""

    def transform(state: StateDict) -> StateDict:
        for name in state:
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                state[name] = torch.zeros_like(state[name])
        state["model.embed_tokens.weight"][:, 0] = 100
        state["model.norm.weight"][:] = 1
        state["lm_head.weight"][257, 0] = weight
        return state

    return transform


NOTHING, LITTLE = "nothing but its end token in .* documents", r"only \d+ tokens in \d+ documents"


@pytest.mark.parametrize(("weight", "found"), [(100, NOTHING), (0.7, LITTLE)])
def test_a_model_that_writes_next_to_nothing_is_refused(tmp_path: Path, weight: float, found: str) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, transform=ends_with(weight))
    with pytest.raises(FlexQuantError, match=rf"model wrote {found}, .* need 128 beside .*--cal"):
        write(model, tmp_path / "variants")
    assert not (tmp_path / "variants").exists()


def test_a_chat_template_that_refuses_is_told(own: Path, tmp_path: Path) -> None:
    (own / "chat_template.jinja").write_text("{{ raise_exception('no user here') }}")
    with pytest.raises(FlexQuantError, match="chat template refuses .*the model's own text .*no user here"):
        write(own, tmp_path / "variants")


COLD = 1e-5
PROMPTS = [[5, 6, 7, 8, 9], [50]]


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), load_tokenizer(model)


def test_every_row_has_its_own_temperature_and_is_the_same_beside_longer_ones(loaded):
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(sample(*loaded, PROMPTS, [COLD, 1.0], 12))
    (cold, warm), (cold_again, warm_again) = found
    assert cold == cold_again and warm != warm_again and max(len(cold), len(warm)) <= 12
    beside = sample(*loaded, PROMPTS, [COLD, COLD], 12)
    assert beside == [sample(*loaded, [prompt], [COLD], 12)[0] for prompt in PROMPTS]


def test_what_is_written_fits_into_the_models_positions(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = [65] * (model.config.max_position_embeddings - 3)
    (written,) = sample(model, tokenizer, [prompt], [1.0], 12)
    assert len(written) <= 3


def test_the_end_token_is_left_out(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert end_tokens(model, tokenizer) == [257]
    (whole,) = sample(model, tokenizer, [[50]], [COLD], 12)
    model.generation_config.eos_token_id = [257, whole[4]]
    try:
        (ended,) = sample(model, tokenizer, [[50]], [COLD], 12)
    finally:
        model.generation_config.eos_token_id = 257
    assert ended == whole[: whole.index(whole[4])]


def test_english_is_known_and_words_come_from_the_vocabulary(loaded: tuple[Any, Any]) -> None:
    assert known_languages(*loaded)[0] is ENGLISH
    # a vocabulary of single bytes has no words
    assert vocabulary_word(loaded[1], Random(0)) == ENGLISH.openings[0]


def test_its_key_has_all_that_the_text_depends_on(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = read_source(small), Calibration(data=SELF, **FEW)
    files = [{**model.files_sha256, name: ""} for name in model.files_sha256]
    changes = [
        *(("source", replace(model, **{name: "another"})) for name in ("weights_sha256", "config_sha256")),
        *(("source", replace(model, files_sha256=others)) for others in files),
        *(("settings", settings.model_copy(update={name: 5})) for name in ("samples", "length", "seed")),
        ("flexquant.quantization.calibration.versions", lambda: {"torch": "9.9"}),
        ("platform.python_version", lambda: "3.99"),
    ]
    assert_whole(partial(_made_with, source=model, settings=settings), changes, monkeypatch)
