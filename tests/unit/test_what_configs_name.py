# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a checkpoint's files name is not loaded, fetched or run; deep, huge and slow ones are named."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from flexquant.checkpoint import patterns
from flexquant.checkpoint.built_model import build_config
from flexquant.checkpoint.folder import read_config, read_json
from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli import main
from flexquant.doctor.examining import examine
from flexquant.documents import MAX_DEPTH, parse_json
from flexquant.documents.texts import read_documents
from flexquant.documents.yaml_document import from_yaml
from flexquant.errors import FlexQuantError
from flexquant.layers.memory_fit import PlanLosses
from flexquant.merge import convert_checkpoint, merge_checkpoints, split_checkpoint
from flexquant.serving.kernels import trial
from tests.checkpoints import make_checkpoint, make_pair
from tests.foreign import write_foreign
from tests.publishers import edits
from tests.refusals import refused
from tests.what_configs_name import KERNEL, KEYS, MAY_REFUSE, run_all


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, str, str]]]:
    folder = tmp_path_factory.mktemp("named")
    made = make_pair(folder, num_layers=1)
    plain = make_checkpoint(folder / "plain", scheme=None, num_layers=1)
    merge_checkpoints(made, folder / "inspect" / "a")
    for command, pair in {"merge": made.values(), "convert": made.values(), "advise": (plain, plain)}.items():
        for name, source in zip("ab", pair, strict=True):
            shutil.copytree(source, folder / command / name)
    shutil.copytree(folder / "inspect" / "a", folder / "inspect" / "b")
    return run_all(folder, KERNELS_MIN_VERSION, ["merge", "convert", "inspect", "advise"])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("command", ["merge", "convert", "inspect", "advise"])
def test_what_is_named_is_not_touched(found, command, key):
    status, said, touched = found[command][key]
    assert not touched
    if key not in MAY_REFUSE:
        assert (status, said) == tuple(found[command]["nothing"][:2]) and status == 0
    elif status:
        assert re.fullmatch(rf"flexquant {command}: error: .*; .*", said)


@pytest.mark.parametrize(
    "key",
    ["attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"]
    + ["auto_map", "transformers_weights", "quantization_config"],
)
def test_a_config_is_built_without(key):
    layer = {"intermediate_size": 96, key: KERNEL}
    config = {"model_type": "llama", "num_hidden_layers": 1, key: KERNEL, "per_layer_config": {"0": layer}}
    built = build_config(config)
    assert KERNEL not in f"{built.to_dict()} {built._attn_implementation} {built._experts_implementation}"
    assert built.per_layer_config[0].intermediate_size == 96


def test_infinities_are_numbers(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("mamba2").save_pretrained(tmp_path)
    assert build_config(read_json(tmp_path / "config.json")).time_step_limit[1] == float("inf")


@pytest.mark.parametrize(
    "name", ["LICENSE.txt", "additional_chat_templates/a.jinja", "vocab.json", "pipe.model"]
)
def test_what_is_not_a_file_of_the_folder_is_not_copied(name, tmp_path):
    sources = make_pair(tmp_path, num_layers=1)
    merge_checkpoints(sources, tmp_path / "merged")
    (tmp_path / "secret").write_text("{}")
    for folder in (*sources.values(), tmp_path / "merged"):
        (folder / name).parent.mkdir(exist_ok=True)
        if name == "pipe.model":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(tmp_path / "secret")
    output = tmp_path / "output"
    for make in (
        lambda: merge_checkpoints(sources, output),
        lambda: convert_checkpoint(sources["w8a8"], output, dtype="float16"),
        lambda: split_checkpoint(tmp_path / "merged", "w8a8", output),
    ):
        with refused(rf"'{name}'( leads outside the|; download)"):
            make()
        assert not output.exists()


DEPTHS = [MAX_DEPTH + 1, 800, 980, 100_000]


def nested(depth: int, inside: str = "1") -> str:
    return '{"a":' * (depth % 2) + '[{"a":' * (depth // 2) + inside + "}]" * (depth // 2) + "}" * (depth % 2)


def test_the_bound_is_a_depth_of_64_and_a_huge_file_is_not_read(tmp_path):
    assert MAX_DEPTH == 64
    for text in (nested(MAX_DEPTH), "[[], {}, 1]", "1"):
        assert parse_json(text) == json.loads(text) == from_yaml(text.encode(), "it", "policy", []).data
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100_000_001)
    with refused("config.json has 100000001 bytes, and 100000000 are allowed"):
        read_config(tmp_path)
    with refused("it: the recipe has 1000001 bytes; write one of at most 1000000"):
        from_yaml(b" " * 1_000_001, "it", "recipe", [])


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_nests_deeper_is_refused(depth, tmp_path):
    for read in (parse_json, lambda text: from_yaml(text.encode(), "it", "policy", [])):
        with pytest.raises((ValueError, FlexQuantError), match="^it(: nested too deep| has more than 64)"):
            read(nested(depth))
    (file := tmp_path / "texts.jsonl").write_text(f'{{"text": {nested(depth)}}}')
    with refused(r"texts.jsonl, line 1 is not JSON \(it has more than 64"):
        list(read_documents(str(file)))
    with refused("texts.jsonl cannot be read .*it has more than 64"):
        PlanLosses(file, "w8a8", [], 1, {})
    file.write_text(nested(depth))
    assert trial._read(file, {}) is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("command", "name"),
    [("inspect", f"{name}.json") for name in ("config", "flexquant_provenance", "model.safetensors.index")]
    + [("merge", f"{name}.json") for name in ("config", "tokenizer", "tokenizer_config", "generation_config")]
    + [("merge", "model.safetensors")],
)
def test_a_deep_file_of_a_checkpoint_is_named(command, name, depth, sources, merged, tmp_path, capsys):
    folder = Path(shutil.copytree(merged if command == "inspect" else sources["w4a16"], tmp_path / "source"))
    text = f'{{"b": {nested(depth)}}}'.encode()
    header = len(text).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    (folder / name).write_bytes(header + text)
    arguments = [f"w4a16={folder}", f"w8a8={sources['w8a8']}", "--output", str(tmp_path / "out")]
    assert main([command, *([str(folder)] if command == "inspect" else arguments)]) == 1
    said = capsys.readouterr().err
    assert re.search(rf"error: .*{name} .*more than 64 lists and mappings", said) and said.count("\n") == 1


SLOW = {
    "in re": "(([a-z_0-9]|[.])+)+!",
    "in regex": r"(\w|\w\w|\.)+[!?]",
    "large in regex": "(?:(?:(?:(?:a?){99}){99}){99}){99}",
    "one of many": r"(?=.*\.1\.mlp)(([a-z_0-9]|[.])+)+!",
}
NAMES = ["lm_head", *(f"model.layers.{n}.{of}_proj" for n in (0, 1) for of in ("self_attn.q", "mlp.down"))]


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the bounds, so that reaching them takes a second."""
    monkeypatch.setattr(patterns, "SECONDS", 1)
    monkeypatch.setattr(patterns, "MIB", 128)


@pytest.mark.parametrize(
    ("expression", "fits"),
    [("^(?!.*lm_head).*", NAMES[1:]), (r".*\.1\.", NAMES[3:]), ("self_attn", [])]
    + [(r".*(?<=q)_proj$", NAMES[1::2]), ("(?i)LM_", NAMES[:1])],
)
def test_an_expression_fits_from_the_start_of_a_name(expression, fits):
    assert patterns.fitting({"it": expression}, NAMES, "a model") == {"it": set(fits)}


def test_the_first_pattern_counts_also_of_names_that_were_not_announced():
    found = patterns.Patterns(["re:.*down", NAMES[2], "re:.*1", "new"], NAMES[:-1], "a model")
    first = {name: found.first(name) for name in (*NAMES, "new", "new 1", "newer")}
    assert list(first.values()) == [None, None, "re:.*down", "re:.*1", "re:.*down", "new", "re:.*1", None]


@pytest.mark.parametrize("case", SLOW)
def test_an_expression_that_reaches_a_bound_is_named(case, bounds):
    given = {"fast": ".*proj", "slow": SLOW[case], "next": ".*"}
    with pytest.raises(FlexQuantError, match="^a model .* be used: 'slow' takes more than 1 s or 128 MiB"):
        patterns.fitting(given, [name * 2 for name in NAMES], "a model")


def test_one_of_100000_levels_is_no_regular_expression():
    with pytest.raises(FlexQuantError, match=r"^a model has .*: 'deep' is no regular expression \(.*recurs"):
        patterns.fitting({"deep": "(" * 100_000 + ")" * 100_000}, NAMES, "a model")


def pattern_in(section: JsonObject, place: str) -> None:
    """Put a slow pattern into a place of a ``quantization_config``."""
    slow = f"re:{SLOW['in re']}"
    if place == "config_groups":
        section[place]["group_0"]["targets"] = [slow]
    elif place == "transform_config":
        apply = [{"targets": ["Linear"], "location": "weight_input", "ignore": [slow]}]
        section[place] = {"config_groups": {"v": {"type": "hadamard", "apply": apply}}}
    else:
        section[place] = {slow.removeprefix("re:"): {}} if place == "dynamic" else [slow]


@pytest.mark.parametrize("place", ["config_groups", "ignore", "transform_config", "dynamic"])
def test_a_slow_pattern_is_refused_wherever_it_stands(place, w4a16, merged, tmp_path, bounds):
    refused = "cannot be used: '(re:)?\\(\\(.* more than 1 s or 128 MiB to match"
    make = write_foreign if place == "dynamic" else lambda of, to, _: Path(shutil.copytree(of, to))
    source, served = make(w4a16, tmp_path / "source", "gptq"), tmp_path / "merged"
    edits.edit_json("config.json", lambda c: pattern_in(c["quantization_config"], place))(source)
    with pytest.raises(FlexQuantError, match=refused):
        merge_checkpoints({"w4a16": source}, tmp_path / "output")
    assert not (tmp_path / "output").exists()
    if place == "dynamic":
        served = source
    else:
        shutil.copytree(merged, served)
        w4a16s = lambda c: c["quantization_config"]["variants"]["w4a16"]["quantization_config"]  # noqa: E731
        edits.edit_json("config.json", lambda c: pattern_in(w4a16s(c), place))(served)
    *_, found = examine(str(served), [])
    assert found.level == "problem" and re.search(refused, found.text)
