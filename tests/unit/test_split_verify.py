# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Splitting gives the sources back bit for bit; verifying finds every changed byte."""

import shutil

import pytest

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, MergedCheckpoint
from flexquant.cli import main
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from tests.checkpoints import flip_a_byte, make_checkpoint
from tests.foreign import assert_equal, config_of, tensors_of
from tests.publishers import edits
from tests.refusals import refused


@pytest.fixture(scope="module")
def merged_once(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "merged"
    merge_checkpoints(sources, folder)
    return folder


@pytest.fixture
def merged(merged_once, tmp_path):
    return shutil.copytree(merged_once, tmp_path / "merged")


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
@pytest.mark.parametrize("max_shard_size", [1 << 30, 100_000])
def test_split_gives_the_source_back(sources, merged, tmp_path, name, max_shard_size):
    output, source = tmp_path / "plain", sources[name]
    split_checkpoint(merged, name, output, max_shard_size=max_shard_size)
    assert_equal(tensors_of(output), tensors_of(source))
    config, original = config_of(output), config_of(source)
    original.pop("_name_or_path", None)
    assert config == original and (output / "model.safetensors").exists() == (max_shard_size == 1 << 30)
    files, expected = ({p.name for p in f.iterdir() if not p.match("model*")} for f in (output, source))
    assert files == expected and (output / "recipe.yaml").read_text() == f"scheme: {name}\n"


def test_split_checkpoints_merge_into_the_same_bytes(sources, merged, tmp_path):
    again = {name: tmp_path / name for name in sources}
    for name, folder in again.items():
        split_checkpoint(merged, name, folder)
    merge_checkpoints(again, tmp_path / "again")
    for file in merged.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_split_without_provenance(sources, merged, tmp_path):
    (merged / PROVENANCE_FILE).unlink()
    split_checkpoint(merged, "w8a8", tmp_path / "plain")
    assert read_tensors(tmp_path / "plain").keys() == read_tensors(sources["w8a8"]).keys()


def test_a_variant_in_16_bit_comes_back_without_a_section(tmp_path):
    bf16 = make_checkpoint(tmp_path / "bf16", scheme=None)
    w8a8 = make_checkpoint(tmp_path / "w8a8", scheme="w8a8")
    merge_checkpoints({"w8a8": w8a8, "bf16": bf16}, tmp_path / "merged", policy="w8a8")
    assert verify_checkpoint(tmp_path / "merged", {"bf16": bf16})
    split_checkpoint(tmp_path / "merged", "bf16", tmp_path / "plain")
    assert "quantization_config" not in config_of(tmp_path / "plain")
    assert_equal(tensors_of(tmp_path / "plain"), tensors_of(bf16))


@pytest.mark.parametrize("policy", ["phaze", "fp8-phase-batch"])
def test_a_policy_is_checked_before_the_weights_are_compared(sources, tmp_path, policy):
    with refused("phaze|fp8"):
        compared = {"kv_progress": lambda *_: pytest.fail("compared")}
        merge_checkpoints(sources, tmp_path / "merged", policy=policy, **compared)


def test_split_refuses_and_so_does_what_is_not_merged(merged, tmp_path, sources):
    with refused("no variant 'fp8'; it has w8a8, w4a16"):
        split_checkpoint(merged, "fp8", tmp_path / "plain")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/notes.txt").touch()
    with refused("exists"):
        split_checkpoint(merged, "w8a8", tmp_path / "plain")
    flip_a_byte(merged, "w8a8.model.layers.0.mlp.up_proj.weight")
    with refused("'w8a8.model.layers.0.mlp.up_proj.weight'.*SHA-256"):
        split_checkpoint(merged, "w8a8", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with refused("not a merged checkpoint"):
        MergedCheckpoint.open(sources["w8a8"])


def test_verify_accepts_what_merge_wrote_and_what_the_hub_and_git_add(sources, merged):
    assert verify_checkpoint(merged)["tensors_compared_with"]["recorded hashes"] == len(read_tensors(merged))
    compared = verify_checkpoint(merged, sources)["tensors_compared_with"]
    assert compared == {name: len(read_tensors(folder)) for name, folder in sources.items()}
    for name in (".gitattributes", ".git/config", ".cache/huggingface/download/config.json.metadata"):
        (merged / name).parent.mkdir(parents=True, exist_ok=True)
        (merged / name).write_text("")
    (merged / "README.md").write_text("# My model\n")
    verify_checkpoint(merged)


@pytest.mark.parametrize(
    "key", ["shared.model.norm.weight", "w4a16.model.layers.1.mlp.up_proj.weight_packed"]
)
def test_verify_finds_a_flipped_byte(sources, merged, key):
    shard = flip_a_byte(merged, key)
    assert shard == f"model-0000{1 if key.startswith('shared.') else 3}-of-00003.safetensors"
    with refused(rf"1 of .*\({key} in {shard}\); fetch or merge"):
        verify_checkpoint(merged)
    with refused(rf"1 of .*\({key.partition('.')[2]} in {shard}\); fetch"):
        verify_checkpoint(merged, {"w4a16": sources["w4a16"]})


@pytest.mark.parametrize(
    "name",
    ["additional_chat_templates/rag.jinja", "x.py", "model-00004-of-00004.safetensors", ".hidden", "a link"],
)
def test_verify_names_files_that_the_merge_did_not_write(sources, merged, name):
    """A reader of a folder may read any kind of file: a template, code, weights that no index lists."""
    (merged / name).parent.mkdir(exist_ok=True)
    if name == "a link":
        (merged / name).symlink_to(merged.parent, target_is_directory=True)
    else:
        (merged / name).write_text("")
    for against in ({}, sources):
        with refused(rf"1 file\(s\) .* did not write \({name}\); remove"):
            verify_checkpoint(merged, against)


def test_verify_finds_a_changed_and_a_missing_file(merged):
    (merged / "tokenizer.json").write_text("{}")
    with refused("tokenizer.json was changed"):
        verify_checkpoint(merged)
    (merged / "chat_template.jinja").unlink()
    with refused("has no file 'chat_template.jinja'"):
        verify_checkpoint(merged)


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        ({"files": ["config.json"]}, "files"),
        ({"files": {"config.json": None}}, "files.config.json"),
        ({"tensors": "none"}, "tensors"),
        ({"tensors": {"shared.model.norm.weight": {"sha256": "0"}}}, "tensors.shared.model.norm"),
        ({"sources": []}, "sources"),
        ({"sources": {"w8a8": "org/model"}}, "sources.w8a8"),
    ],
)
def test_a_malformed_provenance_is_one_sentence(sources, merged, tmp_path, damage, place):
    edits.edit_json(PROVENANCE_FILE, lambda document: document.update(damage))(merged)
    message = rf"{PROVENANCE_FILE} has a wrong '{place}.* fetch or merge the checkpoint again"
    for read in (
        lambda: verify_checkpoint(merged),
        lambda: verify_checkpoint(merged, sources),
        lambda: split_checkpoint(merged, "w8a8", tmp_path / "plain"),
    ):
        with refused(message):
            read()


def test_verify_finds_missing_tensors_and_a_missing_shard(merged):
    edits.edit_json(PROVENANCE_FILE, lambda d: d["tensors"].update({"w8a8.ghost": "00"}))(merged)
    with refused("w8a8.ghost"):
        verify_checkpoint(merged)
    next(iter(merged.glob("model-*.safetensors"))).unlink()
    with refused("has no file 'model-"):
        verify_checkpoint(merged)


def test_verify_against_a_foreign_source(merged, tmp_path):
    other = make_checkpoint(tmp_path / "other", scheme="w8a8", seed=1)
    with refused("tensors in .* differ from"):
        verify_checkpoint(merged, {"w8a8": other})
    deeper = make_checkpoint(tmp_path / "deeper", scheme="w8a8", num_layers=3)
    with refused("that .*merged lacks"):
        verify_checkpoint(merged, {"w8a8": deeper})
    with refused("no variant 'fp8'"):
        verify_checkpoint(merged, {"fp8": other})


def test_verify_against_a_source_that_is_quantised_otherwise(sources, merged, tmp_path):
    other = shutil.copytree(sources["w8a8"], tmp_path / "other")
    groups = config_of(other)["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"]["dynamic"] = False
    edits.section(config_groups=groups)(other)
    with refused("differs from .*other in 'quantization_config'; merge it again"):
        verify_checkpoint(merged, {"w8a8": other})


def test_command_line(sources, merged, tmp_path, capsys):
    assert main(["verify", str(merged), "--json"]) == 0
    assert "tensors equal to recorded hashes" in capsys.readouterr().out
    assert main(["verify", str(merged), "--against", f"w8a8={sources['w8a8']}"]) == 0
    assert main(["split", str(merged), "--variant", "w8a8", "--output", str(tmp_path / "plain")]) == 0
    assert "tensors of 'w8a8', " in capsys.readouterr().out
    again = ["split", str(merged), "--variant", "w8a8", "--output", str(tmp_path / "plain")]
    assert main(again) == 1 and main([*again, "--overwrite", "--max-shard-size", "50KB"]) == 0
    assert len([*(tmp_path / "plain").glob("*.safetensors")]) > 1
    capsys.readouterr()
    flip_a_byte(merged, "shared.model.norm.weight")
    assert main(["verify", str(merged)]) == 1 and "verify: error: 1 of" in capsys.readouterr().err
