# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Tokenizers and generation settings are compared by what they do, and one of each is taken along."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm import SamplingParams

from flexquant.checkpoint.model_config import JsonObject
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.sidecar_plan import SAMPLING, SETTINGS, plan_sidecars
from tests.checkpoints import make_pair
from tests.foreign import config_of
from tests.publishers import edits
from tests.publishers.edits import Edit, both, config, tokenizer, tokenizer_config
from tests.publishers.edits import file as write
from tests.refusals import refused
from tests.unit.full_merge import opened

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer with a few merges and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n")]
    words = [*alphabet, *map("".join, merges)]
    vocab = {word: number for number, word in enumerate(words)} | {"<s>": 500, "</s>": 501, "<tool>": 502}
    bytes_and_words = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bytes_and_words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_and_words.decoder = decoders.ByteLevel()
    bytes_and_words.add_special_tokens(["<tool>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_and_words, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, Path]:
    found = make_pair(tmp_path_factory.mktemp("pair"), vocab_size=512)
    for source in found.values():
        save_tokenizer(source)
    return found


@pytest.fixture
def sources(pair: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Return copies of two variants of one model, with equal tokenizers, for tests to change."""
    return {name: Path(shutil.copytree(source, tmp_path / name)) for name, source in pair.items()}


def without_defaults(content: JsonObject) -> None:
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "byte_fallback", "ignore_merges"):
        content["model"].pop(key, None)


def move_template_into_config(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    tokenizer_config(chat_template=text)(folder)


SAME = {
    "merges as strings": tokenizer(edits.merges_as_strings),
    "truncation and padding": tokenizer(edits.left_by_calibration),
    "defaults left out": tokenizer(without_defaults),
    "is_local and sides": tokenizer_config(is_local=True, padding_side="left", model_max_length=77),
    "a padding token": tokenizer_config(pad_token="</s>"),
    "the template in the config": move_template_into_config,
    "a final newline of the template": write("chat_template.jinja", TEMPLATE + "\n"),
    "no template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "files of transformers 4": both(
        write("special_tokens_map.json", '{"bos_token": "<s>", "eos_token": "</s>"}'),
        write("added_tokens.json", '{"<tool>": 502}'),
    ),
    "a program beside it": write("quantize.py", "print('made with')"),
}


@pytest.mark.parametrize("edited", ["w8a8", "w4a16"])
@pytest.mark.parametrize("case", SAME)
def test_what_does_the_same_is_merged(sources, tmp_path, case, edited):
    SAME[case](sources[edited])
    merge_checkpoints(sources, tmp_path / "merged")
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged("the <tool> thing").input_ids == [257, 220, 502, 220, 256, 258, 70]
    assert merged.chat_template.strip() == TEMPLATE.strip()
    verify_checkpoint(tmp_path / "merged", sources)
    assert not (tmp_path / "merged/quantize.py").exists()


def with_another_end(content: JsonObject) -> None:
    """Fill the model's vocabulary, and add an end behind it."""
    content["model"]["vocab"] |= {f"w{i}": i for i in range(512) if i not in (*range(259), 500, 501, 502)}
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 512, "content": "<eos>"})


TOO_LARGE = "the tokenizer in .*w4a16 has '%s' at 512, and the model 512 tokens"
LACKING = {
    "no files": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
        "w4a16 has no tokenizer, such as a tokenizer.json",
    ),
    "too large": (tokenizer(lambda c: c["model"]["vocab"].update(more=512)), TOO_LARGE % "more"),
    "an end too many": (
        both(tokenizer(with_another_end), tokenizer_config(eos_token="<eos>")),
        TOO_LARGE % "<eos>",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_a_tokenizer_that_is_missing_or_too_large_is_neither_advised_nor_taken(sources, tmp_path, case):
    edit, problem = LACKING[case]
    edit(sources["w4a16"])
    with refused(f"differ: .*{problem}.* choose with --tokenizer-from w8a8$"):
        merge_checkpoints(sources, tmp_path / "merged")
    with refused(f"--tokenizer-from names 'w4a16', but .*{problem}; name another"):
        merge_checkpoints(sources, tmp_path / "merged", tokenizer_from="w4a16")
    merge_checkpoints(sources, tmp_path / "merged", tokenizer_from="w8a8")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("a").input_ids == [64]


SLOW = {"type": "Split", "behavior": "Isolated", "invert": False}
SLOW |= {"pattern": {"Regex": "^(([a-zA-Z ]|[., !])+)+[?]$"}}


def with_a_slow_pattern(content: JsonObject) -> None:
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SLOW, content["pre_tokenizer"]]}


OF_TEXT, SPECIAL = "token ids of the text ", "special tokens, "
LOWERCASE = {"type": "Lowercase"}
OTHER = {
    "merges in another order": (tokenizer(lambda c: c["model"]["merges"].reverse()), "models, 'merges': "),
    "a normaliser": (tokenizer(lambda c: c.update(normalizer=LOWERCASE)), OF_TEXT + "'Hello, world!"),
    "a decoder": (tokenizer(lambda c: c.update(decoder={"type": "Fuse"})), OF_TEXT + "' ', 'decoded': "),
    "a token that is not special": (
        tokenizer(lambda c: c["added_tokens"][-1].update(special=False)),
        "added tokens, '50[012]': .*special=True.* against .*special=False",
    ),
    "another end": (tokenizer_config(eos_token="<tool>"), f"{SPECIAL}'eos_token': '</s>' against '<tool>'"),
    "another template for tools": (
        write("additional_chat_templates/tool_use.jinja", TEMPLATE),
        "chat templates, 'tool_use': None against ",
    ),
    "another token that the template names": (
        tokenizer_config(pad_token="<tool>"),
        f"{SPECIAL}'pad_token': '<s>' against '<tool>'",
    ),
    "a text that cannot be read": (
        tokenizer(with_a_slow_pattern),
        r"tokenizer.json differs, and more cannot be said, as a text cannot be read \(Onig: Regex search",
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_what_does_something_else_is_refused_with_the_difference_and_the_choices(sources, tmp_path, case):
    edit, named = OTHER[case]
    if "template names" in case:
        for source in sources.values():
            both(tokenizer_config(pad_token="<s>"), write("chat_template.jinja", "{{ pad_token }}"))(source)
    edit(sources["w4a16"])
    choices = r"(?s:.*)choose with --tokenizer-from w8a8 or --tokenizer-from w4a16"
    with refused(f"tokenizers of 'w8a8' and 'w4a16' differ: {named}{choices}"):
        merge_checkpoints(sources, tmp_path / "merged")


def test_all_chat_templates_are_compared_also_if_the_first_source_has_none(sources, tmp_path):
    sources["w4a16_b"] = shutil.copytree(sources["w4a16"], tmp_path / "w4a16_b")
    (sources["w8a8"] / "chat_template.jinja").unlink()
    write("chat_template.jinja", TEMPLATE.replace(": ", "> "))(sources["w4a16_b"])
    with refused("tokenizers of 'w4a16' and 'w4a16_b' differ: chat templates"):
        merge_checkpoints(sources, tmp_path / "merged")


def with_code(text: str) -> Edit:
    auto_map = {"AutoTokenizer": ["my_tokenizer.Mine", None]}
    return both(tokenizer_config(auto_map=auto_map), write("my_tokenizer.py", text))


def test_a_tokenizer_with_code_is_not_loaded_and_nobody_is_asked(sources, tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or "n")
    for source in sources.values():
        with_code("raise SystemExit('was run')\n")(source)
        tokenizer_config(tokenizer_class="Mine")(source)
    tokenizer_config(clean_up_tokenization_spaces=True)(sources["w4a16"])
    with refused("tokenizer_config.json differs or is missing, and more cannot"):
        merge_checkpoints(sources, tmp_path / "merged")
    assert asked == []


@pytest.mark.parametrize(
    "code, problem",
    [(b"from .gone import part\n", "No such file or directory"), (b"\xff\xfe\x00", "can't decode byte")],
)
def test_code_that_is_damaged_or_incomplete_is_named(code, problem, sources, tmp_path):
    for source in sources.values():
        with_code("")(source)
        (source / "my_tokenizer.py").write_bytes(code)
    with refused(f"what .*my_tokenizer.py imports cannot be read .*{problem}"):
        merge_checkpoints(sources, tmp_path / "merged")


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[7].content.x() }}", "{% if %}", LOOP, 5])
def test_chat_templates_are_compared_and_not_run(template, sources, tmp_path):
    for name, source in sources.items():
        (source / "chat_template.jinja").unlink()
        tokenizer_config(chat_template=template, made_by=name)(source)
    merge_checkpoints(sources, tmp_path / "merged")


def test_the_code_of_a_tokenizer_that_was_not_chosen_does_not_matter(sources, tmp_path):
    with_code("part = 1\n")(sources["w4a16"])
    merge_checkpoints(sources, tmp_path / "without", tokenizer_from="w8a8")
    assert not (tmp_path / "without/my_tokenizer.py").exists()
    merge_checkpoints(sources, tmp_path / "with", tokenizer_from="w4a16")
    assert (tmp_path / "with/my_tokenizer.py").is_file()


def test_a_choice_takes_the_whole_tokenizer_of_one_source(sources, tmp_path):
    tokenizer(edits.swapped_tokens)(sources["w4a16"])
    for name, ids in (("w8a8", [64, 65]), ("w4a16", [65, 64])):
        merge_checkpoints(sources, tmp_path / f"of {name}", tokenizer_from=name)
        assert AutoTokenizer.from_pretrained(tmp_path / f"of {name}")("ab").input_ids == ids
    with refused("--tokenizer-from names 'fp8', but the variants are w8a8, w4a16"):
        merge_checkpoints(sources, tmp_path / "again", tokenizer_from="fp8")


def settings(**values: object) -> Edit:
    return write("generation_config.json", json.dumps(values))


def ends_of_config(ends: object) -> Edit:
    return config(eos_token_id=ends)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (settings(eos_token_id=501, do_sample=True), settings(eos_token_id=[501], transformers_version="5")),
        (settings(eos_token_id=[7, 501], pad_token_id=1), both(ends_of_config([501, 7]))),
        (settings(eos_token_id=501, top_p=None, use_cache=False), settings(eos_token_id=501, top_p=None)),
        (ends_of_config(501), ends_of_config([501])),
        (settings(eos_token_id=[]), settings()),
        (
            settings(eos_token_id=501, temperature=1.0, top_p=1.0, repetition_penalty=1.0),
            settings(eos_token_id=501, top_k=-1, min_p=0.0),
        ),
    ],
)
def test_generation_settings_of_equal_effect_are_merged(sources, tmp_path, first, second):
    first(sources["w8a8"])
    second(sources["w4a16"])
    merge_checkpoints(sources, tmp_path / "merged")
    written = (tmp_path / "merged/generation_config.json").exists()
    assert written == any((source / "generation_config.json").exists() for source in sources.values())


PENALTIES = [(f"{what}_penalty", [0, 0.0], 0.5) for what in ("presence", "frequency")]
EFFECTS = [*PENALTIES, ("repetition_penalty", [1, 1.0], 1.1), ("temperature", [1, 1.0], 0.6)]
EFFECTS += [("top_k", [0, -1], 40), ("top_p", [1, 1.0], 0.9), ("min_p", [0, 0.0], 0.1)]
EFFECTS += [("max_new_tokens", [], 512), ("eos_token_id", [[]], 257)]
"""Setting, values without an effect, and another value."""


def test_every_setting_is_tested():
    assert {key for key, *_ in EFFECTS} == set(SETTINGS)


@pytest.mark.parametrize(("key", "without_effect", "other"), EFFECTS)
def test_a_setting_counts_unless_vllm_samples_alike_without_it(sources, key, without_effect, other):
    def plan(value: object) -> None:
        settings(**{key: value})(sources["w8a8"])
        settings()(sources["w4a16"])
        plan_sidecars(opened(sources))

    for value in (None, *without_effect):
        plan(value)
    with refused(f"'w8a8' and 'w4a16' differ in {key}: .*--generation-from w8a8"):
        plan(other)
    for value in SAMPLING.get(key, ()):  # top_k -1 is 0
        assert value in without_effect and SamplingParams(**{key: max(value, 0)}) == SamplingParams()


def test_other_generation_settings_are_refused_and_can_be_chosen(sources, tmp_path):
    settings(eos_token_id=501, temperature=0.6)(sources["w8a8"])
    ends_of_config([501, 502])(sources["w4a16"])
    with refused(r"differ in temperature: 0.6 against 1.*--generation-from w8a8 or --generation-from w4a16"):
        merge_checkpoints(sources, tmp_path / "merged")
    merge_checkpoints(sources, tmp_path / "of w8a8", generation_from="w8a8")
    assert json.loads((tmp_path / "of w8a8/generation_config.json").read_text())["temperature"] == 0.6
    merge_checkpoints(sources, tmp_path / "of w4a16", generation_from="w4a16")
    assert not (tmp_path / "of w4a16/generation_config.json").exists()
    assert config_of(tmp_path / "of w4a16")["eos_token_id"] == [501, 502]
    split_checkpoint(tmp_path / "of w8a8", "w4a16", tmp_path / "split")
    assert (tmp_path / "split/generation_config.json").is_file()


@pytest.mark.parametrize("ends", ["501", [501, "7"], True])
def test_an_end_that_is_no_token_id_is_refused(sources, tmp_path, ends):
    settings(eos_token_id=ends)(sources["w8a8"])
    with refused("generation_config.json has eos_token_id .*, expected a token id"):
        merge_checkpoints(sources, tmp_path / "merged")


def test_only_code_that_the_config_loads_has_to_be_equal(sources, tmp_path):
    for source in sources.values():
        both(with_code("from .parts import part\n"), write("parts.py", "part = 1\n"))(source)
    write("benchmark.py", "slow = True\n")(sources["w8a8"])
    merge_checkpoints(sources, tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").glob("*.py")} == {"my_tokenizer.py", "parts.py"}
    write("parts.py", "part = 2\n")(sources["w4a16"])
    with refused(r"parts.py is not the same in 'w8a8' .* need the same code"):
        merge_checkpoints(sources, tmp_path / "again")
