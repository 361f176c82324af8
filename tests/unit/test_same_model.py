# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Variants that any release of transformers saved merge; other models never do, processors by choice."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor import models
from vllm.model_executor.models.registry import ModelRegistry

from flexquant.cli import main
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.formats import open_source
from flexquant.merge.merge_plan import plan_merge
from flexquant.merge.same_inputs import processor_difference
from flexquant.merge.same_model import IGNORED, READ_KEYS, TIED, model_differences
from tests.checkpoints import make_checkpoint, make_pair
from tests.config_pairs import Config, Pair, as_transformers_4_wrote_it, config_of, pairs
from tests.foreign import config_of as read_config
from tests.publishers import edits
from tests.read_keys import table
from tests.refusals import refused
from tests.unit.full_merge import opened
from tests.vision import KINDS, make_vision_checkpoint

PAIRS = list(pairs())
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 512}


def save_as_transformers_4(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(as_transformers_4_wrote_it(read_config(folder))))


@pytest.mark.parametrize("pair", PAIRS, ids=[pair.name for pair in PAIRS])
def test_configs_differ_where_vllm_makes_another_model_of_them(pair: Pair) -> None:
    assert (model_differences(pair.a, pair.b) == []) == pair.alike
    assert (model_differences(pair.b, pair.a) == []) == pair.alike


@pytest.mark.full
def test_the_table_has_what_the_installed_vllm_reads() -> None:
    assert json.loads(READ_KEYS.read_text()) == table()


@pytest.mark.parametrize("old", ["w8a8", "w4a16"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}), ("gemma3", {})],
    ids=["llama", "llama with scaled RoPE", "gemma3"],
)
def test_variants_saved_by_transformers_4_and_5_merge(tmp_path, architecture, options, old):
    sources = make_pair(tmp_path, architecture, **options)
    save_as_transformers_4(sources[old])
    assert merge_checkpoints(sources, tmp_path / "merged").layered_plans
    verify_checkpoint(tmp_path / "merged", sources)
    for name, source in sources.items():
        split_checkpoint(tmp_path / "merged", name, tmp_path / f"{name} again")
        plan_merge([open_source("source", source), open_source("again", tmp_path / f"{name} again")])


def plan_with(tmp_path: Path, edit: Config, **options: Any) -> None:
    """Plan a merge of two roundings; the second is as transformers 4 saved it, with edits (None: removed)."""
    folders = make_pair(tmp_path, **options)
    save_as_transformers_4(folders["w4a16"])
    edited = read_config(folders["w4a16"]) | edit
    kept = {key: value for key, value in edited.items() if edit.get(key, "") is not None}
    (folders["w4a16"] / "config.json").write_text(json.dumps(kept))
    plan_merge(opened(folders))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"rope_theta": 20000.0}, r"rope_parameters.rope_theta: 10000.0 against 20000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_parameters.factor: None against 2.0"),
        ({"rope_scaling": LLAMA3}, r"rope_parameters.rope_type: 'default' against 'llama3'"),
        ({"rope_scaling": [8.0]}, r"not describe a llama model .*'rope_parameters' with value \[8.0\]"),
        ({"torch_dtype": "float16"}, r"dtype: 'bfloat16' against 'float16'"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads: 2 against 4"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'silu' against 'gelu'"),
        ({"max_position_embeddings": 77}, r"max_position_embeddings: \d+ against 77"),
        ({"mlp_bias": True}, r"mlp_bias: False against True"),
    ],
)
def test_another_model_is_refused_though_releases_differ(tmp_path, edit, named):
    with refused(named):
        plan_with(tmp_path, edit)


def test_null_is_not_the_default_of_an_absent_key_and_a_default_that_is_left_out_is_no_difference(tmp_path):
    """Mistral's window is 4096 tokens if its config has no key for it, and there is none if it says null."""
    edit = {"sliding_window": None}
    with refused("sliding_window: None against 4096"):
        plan_with(tmp_path / "another", edit, architecture="mistral")
    plan_with(tmp_path / "default", edit, architecture="mistral", sliding_window=4096)
    plan_with(tmp_path / "left out", {"attention_dropout": None})
    with refused("tie_word_embeddings: "):
        plan_with(tmp_path / "tied", {"tie_word_embeddings": None}, tie_word_embeddings=True)


@pytest.mark.parametrize("value", [False, True])
def test_an_absent_key_has_no_value_where_its_readers_have_several_defaults(value):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert model_differences(config, config | {"use_sep_token": value}) == [("use_sep_token", None, value)]


def test_keys_that_no_server_reads_may_differ(tmp_path):
    """AutoAWQ, AutoGPTQ, unsloth and each release of transformers write some of them."""
    edit = dict.fromkeys(("_attn_implementation_autoset", "_from_model_config", "unsloth_fixed"), True)
    edit |= {"_name_or_path": "elsewhere", "attention_dropout": 0.1, "id2label": {"0": "yes"}}
    edit |= {"bos_token_id": 7, "eos_token_id": [257], "pad_token_id": 7, "license": "mit"}
    edit |= {"pretraining_tp": 2, "tokenizer_class": "PreTrainedTokenizerFast"}
    edit |= {"torchscript": True, "use_cache": False}
    assert edit.keys() <= IGNORED
    plan_with(tmp_path, edit)


LOOKED_AT = {
    ("attention_dropout", "commandr.py"),  # handed on, and read nowhere
    ("hidden_dropout", "chatglm.py"),  # a dropout, which inference does without
}


def test_no_served_model_of_vllm_reads_a_key_that_may_differ():
    results = Path(__file__).parents[1] / "architectures/results.json"
    outcomes = json.loads(results.read_text())["architectures"]
    served = [name for name, found in outcomes.items() if found["outcome"] == "served"]
    names = {ModelRegistry.models[name].module_name.rpartition(".")[2] for name in served}
    files = [file for name in names if (file := Path(models.__path__[0], f"{name}.py")).is_file()]
    own = IGNORED - {"quantization_config", "compression_config"}
    readers = {
        (key, file.name)
        for file in files
        for key in own
        if re.search(rf"config\.{key}\b|getattr\([^)]*[\"']{key}[\"']", file.read_text())
    }
    assert len(files) > 40 and readers <= LOOKED_AT


def test_a_choice_says_whose_config_a_model_gets(tmp_path):
    sources = make_pair(tmp_path)
    edits.config(rope_parameters={"rope_type": "default", "rope_theta": 5e4})(sources["w4a16"])
    message = "rope_theta: 10000.0 against 50000.0.*choose with --config-from w8a8 or --config-from w4a16"
    with refused(message):
        merge_checkpoints(sources, tmp_path / "merged")
    arguments = [f"{name}={folder}" for name, folder in sources.items()]
    assert main(["merge", *arguments, "--output", str(tmp_path / "merged"), "--config-from", "w4a16"]) == 0
    assert read_config(tmp_path / "merged")["rope_parameters"]["rope_theta"] == 5e4
    verify_checkpoint(tmp_path / "merged", sources)
    with refused("--config-from names 'fp8', but the variants are w8a8, w4a16"):
        merge_checkpoints(sources, tmp_path / "again", config_from="fp8")


@pytest.mark.parametrize(
    ("of_the_other", "message"),
    [
        ({"num_layers": 3}, "'w4a16' is a LlamaForCausalLM of 3 layers and 'w8a8' a LlamaForCausalLM of 2"),
        ({"architecture": "mistral"}, "'w4a16' is a MistralForCausalLM of 2 layers"),
        ({"intermediate_size": 512}, r"mlp.down_proj.weight' has shape \[128, 256\] in 'w8a8'"),
        ({"seed": 1}, "cannot share a KV cache"),
    ],
    ids=["layers", "architecture", "shapes", "weights"],
)
def test_no_choice_of_a_config_merges_two_models(tmp_path, of_the_other, message):
    sources = {"w8a8": make_checkpoint(tmp_path / "w8a8")}
    sources["w4a16"] = make_checkpoint(tmp_path / "w4a16", scheme="w4a16", **of_the_other)
    with refused(message):
        merge_checkpoints(sources, tmp_path / "merged", config_from="w8a8")
    assert not (tmp_path / "merged").exists()


def test_names_of_code_count_for_nothing_where_transformers_has_the_model(tmp_path):
    sources = make_pair(tmp_path)
    edits.config(auto_map={"AutoModelForCausalLM": "modeling.Mine"})(sources["w8a8"])  # without its file
    merge_checkpoints(sources, tmp_path / "merged")
    assert "auto_map" not in read_config(tmp_path / "merged")


def test_a_model_that_transformers_does_not_know_has_its_keys_compared_as_they_are():
    config = {"architectures": ["MineForCausalLM"], "model_type": "mine", "width": 1}
    assert model_differences(config, config | {"use_cache": False, "depth": None}) == []
    found = model_differences(config, config | {"width": 2, "use_mrope": False})
    assert found == [("use_mrope", None, False), ("width", 1, 2)]


def test_the_tie_may_be_stated_at_either_level():
    """Without a tie at its top, Mistral 3 has one; the tensors tell whose head it is."""
    config = config_of("mistral3")
    text = {key: value for key, value in config["text_config"].items() if key != TIED}
    top = config | {"text_config": text, TIED: False}
    below = config | {"text_config": text | {TIED: False}}
    del below[TIED]
    assert model_differences(top, below) == []
    assert model_differences(top, top | {TIED: True}) == [(TIED, False, True)]


Files = dict[str, dict[str, Any]]
"""Name of a JSON file without its ending -> what it holds."""
BOUNDS = {"min": "shortest", "max": "longest"}
OF_A_PART = dict.fromkeys(("crop_size", "device", "do_center_crop", "return_tensors"))
OF_A_PART |= {"data_format": "channels_first", "default_to_square": False, "do_convert_rgb": True}
"""Part of what transformers 4 wrote of each part of a processor."""


def of_transformers_4(processor: dict[str, Any]) -> Files:
    """Return the files in which transformers 4 wrote a processor, with defaults and old names."""
    files = {"processor_config": {k: v for k, v in processor.items() if not k.endswith("_processor")}}
    image = processor["image_processor"]
    kind = f"{image['image_processor_type']}Fast"
    files["preprocessor_config"] = {**image, **OF_A_PART, "image_processor_type": kind}
    if video := processor.get("video_processor"):
        edges = {f"{at}_pixels": video["size"][f"{edge}_edge"] for at, edge in BOUNDS.items()}
        files["video_preprocessor_config"] = {**video, **OF_A_PART, **edges, "max_frames": 768}
    return files


def write(folder: Path, files: Files) -> None:
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def sources(folder: Path, kind: str, files: Files) -> dict[str, Path]:
    """Return W8A8 with the processor's files of transformers 5, and W4A16 with these."""
    made = {v: make_vision_checkpoint(folder / v, v, KINDS[kind]) for v in ("w8a8", "w4a16")}
    write(made["w4a16"], files)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_both_releases_of_transformers_write_one_processor(tmp_path, kind):
    processor = deepcopy(KINDS[kind].processor)
    if video := processor.get("video_processor"):
        video["size"]["shortest_edge"] //= 4
    variants = sources(tmp_path, kind, of_transformers_4(processor))
    write(variants["w8a8"], {"processor_config": processor})
    assert processor_difference(*opened(variants)) is None
    assert plan_merge(opened(variants)).sidecars.files["processor_config.json"].parent == variants["w8a8"]


SIGLIP, GEMMA = {"image_processor_type": "SiglipImageProcessor"}, {"processor_class": "Gemma3Processor"}
EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "image_processor, 'image_mean'": ("preprocessor_config", {"image_mean": [0.1, 0.2, 0.3]}),
    "image_processor, 'size': 'longest_edge': 56 against 1456": ("preprocessor_config", {"size": None}),
    "image_processor, 'do_normalize': True against False": ("preprocessor_config", {"do_normalize": False}),
    "image_processor, 'do_image_splitting': True against None": ("preprocessor_config", SIGLIP),
    "class, 'processor_class': 'Idefics3Processor' against": ("processor_config", GEMMA),
    "processor, 'image_seq_len': 4 against 169": ("processor_config", {"image_seq_len": None}),
}
"""What a message names -> file, and the edit of it."""


@pytest.mark.parametrize("named", EDITS)
def test_processors_that_do_something_else_need_a_choice(tmp_path, named):
    files = of_transformers_4(KINDS["idefics3"].processor)
    file, edit = EDITS[named]
    files[file] |= edit
    variants = sources(tmp_path, "idefics3", files)
    with refused(f"the processors of 'w8a8' and 'w4a16' differ: {named}.*--processor-from w4a16"):
        merge_checkpoints(variants, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merge_checkpoints(variants, tmp_path / "merged", processor_from="w4a16")
    for name, content in files.items():
        assert json.loads((tmp_path / "merged" / f"{name}.json").read_text()) == content


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_videos_are_compared_with_the_defaults_of_a_class_that_needs_torchvision(tmp_path, kind):
    files = of_transformers_4(KINDS[kind].processor)
    files["video_preprocessor_config"]["max_frames"] = 7
    difference = processor_difference(*opened(sources(tmp_path, kind, files)))
    assert difference == "video_processor, 'max_frames': 768 against 7"


def test_a_processor_that_one_source_has_comes_along(tmp_path):
    variants = sources(tmp_path, "idefics3", {})
    write(variants["w8a8"], {})
    parts = of_transformers_4(KINDS["idefics3"].processor)
    write(variants["w4a16"], parts)
    merge_checkpoints(variants, tmp_path / "merged")
    assert {path.stem for path in (tmp_path / "merged").glob("*processor_config.json")} == parts.keys()


def test_the_files_come_from_the_source_that_has_more_parts(tmp_path):
    whole = KINDS["idefics3"].processor
    variants = sources(tmp_path, "idefics3", {"processor_config": whole})
    write(variants["w8a8"], {"processor_config": of_transformers_4(whole)["processor_config"]})
    merge_checkpoints(variants, tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "processor_config.json").read_text()) == whole


def test_settings_that_no_class_takes_are_refused_with_the_choice(tmp_path):
    files = of_transformers_4(KINDS["idefics3"].processor)
    files["preprocessor_config"]["size"] = "wide"
    with refused(r"the processor in .*w4a16 cannot be read .*--processor-from"):
        merge_checkpoints(sources(tmp_path, "idefics3", files), tmp_path / "merged")


def test_code_that_a_processor_names_is_not_run(tmp_path):
    files = of_transformers_4(KINDS["idefics3"].processor)
    kind = {"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "mine.Mine"}}
    files["preprocessor_config"] |= kind
    variants = sources(tmp_path, "idefics3", files)
    (variants["w4a16"] / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    assert processor_difference(*opened(variants)) and not (tmp_path / "ran").exists()
