# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every bad input of a merge has a message of its own, and leaves nothing behind."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.folder import INDEX_FILE, SINGLE_FILE
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.merge.formats import open_source
from flexquant.merge.merge_plan import plan_merge
from tests.checkpoints import make_checkpoint, make_pair
from tests.foreign import assert_equal, tensors_of
from tests.publishers import edits
from tests.publishers.edits import Edit
from tests.refusals import refused

ABSENT = object()
SECOND_SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def sources(sources, tmp_path):
    """Return copies of the sources, for tests to break."""
    return {name: shutil.copytree(folder, tmp_path / name) for name, folder in sources.items()}


def fails(sources, *fragments: str) -> None:
    """Assert that merging is refused in one sentence with the fragments, and leaves no output or stage."""
    output = sources["w8a8"].parent / "merged"
    before = sorted(output.parent.iterdir())
    with pytest.raises(FlexQuantError) as error:
        merge_checkpoints(sources, output)
    message = str(error.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    assert sorted(output.parent.iterdir()) == before


def edit_index(folder: Path, change) -> None:
    """Change an index's map from tensors to files."""
    edits.edit_json(INDEX_FILE, lambda index: index.update(weight_map=change(index["weight_map"])))(folder)


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin: int, end: int, dtype: str = "U8", shape: list | None = None) -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "problem"),
    [
        (b"{not json", b"", "not valid JSON"),
        (b"[" * 200_000, b"", "not valid JSON"),
        (b"[1, 2]", b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "a key appears twice"),
        ({"a": {"dtype": "U8"}}, b"", "'a' lacks a dtype"),
        ({"a": entry(0, 4, "X9")}, bytes(4), "unknown dtype 'X9'"),
        ({"a": entry(0, 4, ["U8"])}, bytes(4), "unknown dtype"),
        ({"a": entry(0, 4, shape=[-4])}, bytes(4), "not natural numbers"),
        ({"a": entry(0, 4, shape=[4.0])}, bytes(4), "not natural numbers"),
        ({"a": entry(0, 4, "F32", [2])}, bytes(4), "has 4 bytes of data"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "'b' overlaps"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, bytes(8), "leaves a gap before it"),
        ({"a": entry(0, 4)}, bytes(3), "truncated"),
        ({"a": entry(0, 4)}, bytes(5), "followed by foreign bytes"),
    ],
)
def test_corrupt_safetensors(sources, header, data, problem):
    write_raw(sources["w4a16"] / SINGLE_FILE, header, data)
    fails(sources, SINGLE_FILE, problem)


@pytest.mark.parametrize("length", [0, 1, 10_000, 1 << 40, (1 << 64) - 1])
def test_bad_header_length(sources, length):
    write_raw(sources["w4a16"] / SINGLE_FILE, {"a": entry(0, 4)}, bytes(4), length)
    fails(sources, SINGLE_FILE, f"its header claims {length} bytes")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors(sources, keep):
    file = sources["w4a16"] / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:keep])
    fails(sources, "not a sound safetensors file")


def test_load_tensor_reads_what_safetensors_reads(w4a16):
    assert_equal(tensors_of(w4a16), load_file(w4a16 / SINGLE_FILE))


def lost(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def with_a_layer_of_5000_digits(tensors) -> None:
    tensors[f"model.layers.{'9' * 5000}.mlp.bias"] = tensors["model.norm.weight"].clone()


def quantised_by(method: str) -> Edit:
    return edits.config(quantization_config={"quant_method": method})


NORM, UP_SHAPE = "model.norm.weight", "model.layers.0.mlp.up_proj.weight_shape"
FLOAT8 = {"num_bits": 8, "type": "float"}
OF_MISTRAL = edits.config(architectures=["MistralForCausalLM"])


@pytest.mark.parametrize(
    ("variant", "edit", "fragments"),
    [
        ("w8a8", lost(SECOND_SHARD), f"no file '{SECOND_SHARD}'"),
        ("w4a16", lost(SINGLE_FILE), "w4a16 has no safetensors file, and weights in .bin files"),
        ("w8a8", quantised_by("gptq"), "no linear in the format of gptq"),
        ("w8a8", quantised_by("bitsandbytes"), "quant_method 'bitsandbytes'; compressed-tensors, awq, gptq"),
        ("w4a16", OF_MISTRAL, "'w8a8' is a LlamaForCausalLM and 'w4a16' a MistralForCausalLM"),
        ("w4a16", edits.section(kv_cache_scheme=FLOAT8), "kv_cache_scheme None; num_bits"),
        ("w4a16", lost("tokenizer_config.json"), "differ: special tokens, ; --tokenizer-from w4a16"),
        ("w4a16", edits.without(".layers.1."), "'w4a16' has no tensors for layer 1 of 2"),
        ("w4a16", edits.without(NORM), f"'w8a8' has parameter '{NORM}' and 'w4a16' does not"),
        ("w4a16", edits.without(UP_SHAPE), f"without '{UP_SHAPE}'"),
        ("w4a16", edits.tensors(with_a_layer_of_5000_digits), "has parameter 'model.layers.999"),
    ],
)
def test_what_is_wrong_with_one_source_is_named(sources, variant, edit, fragments):
    edit(sources[variant])
    fails(sources, *fragments.split("; "))


@pytest.mark.parametrize("escape", ["relative", "absolute", "link"])
def test_index_naming_a_shard_outside_the_folder(sources, escape):
    folder, shard = sources["w8a8"], SECOND_SHARD
    outside = folder.parent / "outside.safetensors"
    (folder / shard).rename(outside)
    name = {"relative": "../outside.safetensors", "absolute": str(outside), "link": shard}[escape]
    if escape == "link":
        (folder / shard).symlink_to(outside)
    edit_index(folder, lambda files: {key: name if file == shard else file for key, file in files.items()})
    fails(sources, "leads outside the checkpoint folder")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000], ids=["zero", "long"])
def test_index_naming_what_cannot_be_a_file(sources, name):
    edit_index(sources["w8a8"], lambda files: dict.fromkeys(files, name))
    fails(sources, "cannot be the name of a file")


@pytest.mark.parametrize("moved", ["", "hub", "hub/models--org--model"])
def test_hub_cache_links_are_followed_also_on_another_disk(sources, tmp_path, moved):
    repository = tmp_path / "hub" / "models--org--model"
    if moved:
        (tmp_path / "disk" / "kept").mkdir(parents=True)
        (tmp_path / moved).parent.mkdir(exist_ok=True)
        (tmp_path / moved).symlink_to(tmp_path / "disk" / "kept")
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(sources["w8a8"].iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert len(open_source("w8a8", snapshot).tensors) > 10
    merge_checkpoints({"w8a8": snapshot, "w4a16": sources["w4a16"]}, tmp_path / "merged")
    provenance = json.loads((tmp_path / "merged" / "flexquant_provenance.json").read_text())
    assert provenance["sources"]["w8a8"]["folder"] == "org/model@abc"
    copy = shutil.copy(snapshot / "config.json", repository / "refs.json")
    (blobs / "led").symlink_to(copy)
    for elsewhere in (sources["w4a16"] / "config.json", copy, blobs / "led"):
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(elsewhere)
        with refused("outside"):
            open_source("w8a8", snapshot)


def test_index_and_shards_disagree(sources):
    folder = sources["w8a8"]
    name, shard = next(iter(json.loads((folder / INDEX_FILE).read_text())["weight_map"].items()))
    edit_index(folder, lambda files: {**files, "ghost": shard})
    fails(sources, "lists tensor 'ghost'", "does not hold it")
    edit_index(folder, lambda files: {k: v for k, v in files.items() if k not in ("ghost", name)})
    fails(sources, f"holds tensor '{name}'", "lists nowhere")
    edit_index(folder, lambda files: [])
    fails(sources, "has no weight_map")


def test_bad_config_and_no_such_folder(sources):
    fails({**sources, "w4a16": Path("/no/such/folder")}, "no such folder: /no/such/folder")
    fails({**sources, "w4a16": sources["w4a16"] / "config.json"}, "is not a folder")
    config = sources["w8a8"] / "config.json"
    config.write_text("{")
    fails(sources, "config.json is not valid JSON")
    config.write_text("[]")
    fails(sources, "expected an object")
    config.unlink()
    fails(sources, "no file 'config.json'")


def test_variant_names(sources):
    pair = list(sources.items())
    with refused("'w8a8' is given twice"):
        merge_checkpoints([pair[0], ("w8a8", pair[1][1])], sources["w8a8"].parent / "merged")
    fails({**sources, "shared": pair[0][1]}, "'shared' is not a variant name")
    for name in ("half", "training", "update"):
        fails({**sources, name: pair[0][1]}, f"cannot load a variant named '{name}'")
    with refused("nothing to merge"):
        merge_checkpoints([], sources["w8a8"].parent / "merged")


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 640), ("num_hidden_layers", 3)])
def test_different_base_config(sources, key, value):
    edits.config(**{key: value})(sources["w4a16"])
    fails(sources, "base configs of 'w8a8' and 'w4a16' differ", key)


def with_cache_scheme(folder: Path, **keys: object) -> None:
    edits.section(kv_cache_scheme={"num_bits": 8, **keys})(folder)


def test_cache_schemes_are_compared_by_what_serving_reads(sources):
    served = {"type": "float", "strategy": "tensor", "symmetric": True}
    with_cache_scheme(sources["w8a8"], **served)
    of_calibrating = {"observer": "minmax", "observer_kwargs": {"averaging_constant": 0.1}}
    with_cache_scheme(sources["w4a16"], **served, **of_calibrating, dynamic=False, group_size=None)
    plan_merge([open_source(name, folder) for name, folder in sources.items()])
    with_cache_scheme(sources["w4a16"], type="float", symmetric=False)
    fails(sources, "kv_cache_scheme", "'symmetric': True", "'symmetric': False")
    with_cache_scheme(sources["w4a16"], type="half")
    fails(sources, "the kv_cache_scheme in", "w4a16 cannot be read")


def test_different_shapes(sources):
    def shrink_linear(tensors):
        for name, tensor in tensors.items():
            if name.startswith("model.layers.0.mlp.up_proj.weight"):
                tensors[name] = tensor[:128].clone()
        tensors[UP_SHAPE][0] = 128

    edits.tensors(lambda t: t.update({NORM: t[NORM][:64]}))(sources["w4a16"])
    fails(sources, f"'{NORM}' has shape [128] in 'w8a8' and [64] in 'w4a16'")
    edits.tensors(lambda t: t.update({NORM: t[NORM].repeat(2)}))(sources["w4a16"])
    edits.tensors(shrink_linear)(sources["w4a16"])
    fails(sources, "'model.layers.0.mlp.up_proj.weight' has shape [256, 128] in 'w8a8' and [128, 128]")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_attention_heads", 0, "has num_attention_heads 0, expected a whole number from 1"),
        ("num_attention_heads", -4, "has num_attention_heads -4, expected"),
        ("num_attention_heads", 3, "not a multiple of the number of attention heads (3)"),
        ("num_attention_heads", "4", "'num_attention_heads' expected int, got str"),
        ("num_attention_heads", 1 << 40, "expected a whole number from 1 to 16777216"),
        ("num_attention_heads", ABSENT, "but the model that its config.json describes has"),
        ("num_key_value_heads", 0, "num_key_value_heads 0, expected"),
        ("num_key_value_heads", 3, "no multiple of its num_key_value_heads 3"),
        ("num_key_value_heads", 2.0, "'num_key_value_heads'"),
        ("hidden_size", 0, "hidden_size 0, expected"),
        ("hidden_size", 130, "hidden size (130) is not a multiple of the number of attention heads"),
        ("hidden_size", ABSENT, "but the model that its config.json describes has"),
        ("hidden_size", 64, "'model.embed_tokens.weight' has shape [320, 128]"),
        ("head_dim", 0, "head_dim 0, expected"),
        ("head_dim", 16, "'model.layers.0.self_attn.q_proj.weight' has shape [128, 128]"),
        ("intermediate_size", 257, "'model.layers.0.mlp.gate_proj.weight' has shape [256, 128]"),
        ("vocab_size", 321, "'model.embed_tokens.weight' has shape [320, 128]"),
        ("max_position_embeddings", 1024.0, "'max_position_embeddings' expected int, got float"),
        ("rms_norm_eps", "1e-6", "'rms_norm_eps' expected float, got str"),
        ("initializer_range", 1, "'initializer_range' expected float, got int"),
        ("rope_parameters", "default", "'rope_parameters'"),
        ("num_hidden_layers", 10**30, "num_hidden_layers"),
        ("architectures", [None], "names no architectures"),
    ],
)
def test_numbers_of_a_config_that_no_model_has(sources, key, value, problem):
    for folder in sources.values():  # in all of them alike, so that they do not differ
        change = (lambda c: c.pop(key)) if value is ABSENT else (lambda c: c.update({key: value}))
        edits.edit_json("config.json", change)(folder)
    fails(sources, problem)


def test_what_a_config_leaves_out_is_as_transformers_has_it(tmp_path):
    """The nested configs of published multimodal models leave these keys out."""
    made = make_pair(tmp_path, num_key_value_heads=4)
    for folder in made.values():
        edits.edit_json("config.json", lambda c: [c.pop("num_key_value_heads"), c.pop("head_dim")])(folder)
    merge_checkpoints(made, tmp_path / "merged")


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("model.layers.1.input_layernorm.weight", [64], "has shape [64] in"),
        ("model.norm.weight", [128, 1], "has shape [128, 1] in"),
        ("model.embed_tokens.weight", [128, 320], "has shape [128, 320] in"),
        ("model.layers.0.mlp.gate_proj.weight_scale", [256], "of shape [256], expected [256, 2]"),
        ("model.layers.0.mlp.gate_proj.weight_packed", [128, 32], "does not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_though_all_variants_have_them(tmp_path, name, shape, problem):
    """The variants are two copies of one, so none differs from the other."""
    source = make_checkpoint(tmp_path / "w4a16", scheme="w4a16")

    def reshape(tensors):
        tensors[name] = tensors[name].flatten()[: math.prod(shape)].reshape(shape).clone()

    edits.tensors(reshape)(source)
    fails({"w8a8": source, "w4a16": source}, problem)


@pytest.mark.parametrize("name", ["config.json", SINGLE_FILE, "tokenizer.json", "tokenizer.model"])
def test_a_pointer_of_git_lfs_is_called_one(sources, name):
    for folder in sources.values():
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4096\n"
        (folder / name).write_text(pointer)
    fails(sources, f"{name} is a git-lfs pointer to the file; fetch it with 'git lfs pull'")


def test_half_a_character_in_a_name_is_refused(sources):
    file, half = sources["w4a16"] / SINGLE_FILE, json.dumps("\udaff")
    write_raw(file, f'{{{half}: {{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}}}'.encode(), bytes(4))
    fails(sources, "its header is not valid JSON", "surrogates not allowed")
    (sources["w4a16"] / "config.json").write_text(f'{{"architectures": [{half}]}}')
    fails(sources, "config.json is not valid JSON", "surrogates not allowed")


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "no such"}}', '{"added_tokens": 3}'])
def test_a_tokenizer_that_cannot_be_read_is_named(sources, text):
    (sources["w4a16"] / "tokenizer.json").write_text(text)
    with refused(r"the tokenizer of .*w4a16 cannot be read \(.*\); put its files"):
        load_tokenizer(sources["w4a16"])
