# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging: what is written, in how much memory, and the command line."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.merge import in_child, make_sources, merge_once
from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_config import ARCHITECTURE, MergedConfig
from flexquant.checkpoint.safetensors_io import read_header, total_bytes
from flexquant.checkpoint.writer import plan_shards, writing_checkpoint, writing_shards
from flexquant.cli import main
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, verify_checkpoint
from flexquant.policy.rules import load_policy
from tests import programs
from tests.checkpoints import fold_final_norm, load_all, make_checkpoint, make_pair
from tests.foreign import config_of
from tests.refusals import refused
from tests.unit.edits import double_keys_of_the_last_layer, edit_tensor, in_float32


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_tensors_are_stored_once_or_under_their_variant(sources, tmp_path):
    output = tmp_path / "merged"
    merge_checkpoints(sources, output)
    merged = load_all(output)
    originals = {name: load_all(folder) for name, folder in sources.items()}
    shared = {key.removeprefix("shared.") for key in merged if key.startswith("shared.")}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= shared
    for name, tensors in originals.items():
        for key, tensor in tensors.items():
            stored = merged.pop(f"{name}.{key}") if key not in shared else merged[f"shared.{key}"]
            assert stored.dtype == tensor.dtype and stored.equal(tensor)
    assert merged.keys() == {f"shared.{key}" for key in shared}


def test_tensors_that_only_have_name_and_size_in_common_are_stored_for_each_variant(tmp_path):
    sources = make_pair(tmp_path, change=fold_final_norm)
    merge_checkpoints(sources, tmp_path / "merged")
    merged = load_all(tmp_path / "merged")
    for key in ("model.norm.weight", "lm_head.weight"):
        assert f"shared.{key}" not in merged
        for name, folder in sources.items():
            assert merged[f"{name}.{key}"].equal(load_all(folder)[key])


def test_config_and_files(sources, tmp_path):
    output = tmp_path / "merged"
    merge_checkpoints(sources, output)
    config, original = config_of(output), config_of(sources["w8a8"])
    assert config["architectures"] == [ARCHITECTURE]
    assert config["hidden_size"] == original["hidden_size"]
    merged = MergedConfig.from_json(config["quantization_config"])
    assert merged.base_architecture == "LlamaForCausalLM"
    assert merged.variants["w8a8"].quantization_config == original["quantization_config"]
    assert merged.policy is None
    files = contents(output)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert files[name] == (sources["w8a8"] / name).read_bytes()
    assert files["recipe.w4a16.yaml"] == b"scheme: w4a16\n" and "recipe.yaml" not in files
    assert str(sources["w8a8"].parent).encode() not in b"".join(files.values())
    card = files["README.md"].decode()
    assert "`w8a8`" in card and "vllm serve" in card


def test_a_file_may_be_as_large_as_the_largest(sources):
    tensors = read_tensors(sources["w8a8"])
    sizes = {size: len(plan_shards([tensors], total_bytes(tensors) + size)) for size in (0, -1)}
    assert sizes == {0: 1, -1: 2}


def test_the_room_that_is_asked_for_has_place_for_copied_files(tmp_path, monkeypatch):
    (tokenizer := tmp_path / "tokenizer.json").write_bytes(bytes(2 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 << 20))
    files, output = {tokenizer.name: tokenizer}, tmp_path / "merged"
    with refused("needs 3.0 MiB of free disk space, but .* has 2.0 MiB"):
        writing_checkpoint(output, [], files, overwrite=False).__enter__()
    assert not output.exists()


def test_shards_hold_one_group_each_and_the_index_is_sorted(sources, tmp_path):
    output = tmp_path / "merged"
    merge_checkpoints(sources, output, max_shard_size=100_000)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    weight_map = index["weight_map"]
    assert list(weight_map) == sorted(weight_map)
    shards = sorted(output.glob("*.safetensors"))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert [f.name for f in shards] == names
    groups, total = [], 0
    for shard in shards:
        with safe_open(shard, "pt") as f:
            assert f.metadata() == {"format": "pt"}
            tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
        assert all(weight_map[key] == shard.name for key in tensors)
        (group,) = {key.partition(".")[0] for key in tensors}
        groups.append(group)
        size = sum(t.nbytes for t in tensors.values())
        assert size <= 100_000 or len(tensors) == 1
        total += size
    assert list(dict.fromkeys(groups)) == ["shared", "w8a8", "w4a16"]
    assert index["metadata"]["total_size"] == total


def test_every_tensor_lies_where_a_reader_can_map_it(tmp_path):
    """Tensors of odd sizes come before those of wide numbers, by name; headers have every length."""
    for length in range(1, 9):
        folder = tmp_path / str(length)
        folder.mkdir()
        dtypes = {f"{'a' * length}.mask": (3, torch.bool), "b.weight": (5, torch.int8)}
        dtypes |= {"c.scale": (3, torch.bfloat16), "d.packed": (3, torch.int32), "e.shape": (1, torch.int64)}
        state = {name: torch.ones(size, dtype=dtype) for name, (size, dtype) in dtypes.items()}
        save_file(state, folder / "source.safetensors")
        shards = plan_shards([read_header(folder / "source.safetensors")], 1 << 30)
        with writing_shards(folder, shards) as finish:
            finish(None)
        written = read_header(folder / "model.safetensors")
        assert written.keys() == state.keys()
        assert all(ref.begin % state[name].element_size() == 0 for name, ref in written.items())
        assert all(tensor.equal(state[k]) for k, tensor in load_file(folder / "model.safetensors").items())


def test_tied_embeddings_stay_tied(tmp_path):
    merge_checkpoints(make_pair(tmp_path, "gemma3"), tmp_path / "merged")
    assert not [key for key in load_all(tmp_path / "merged") if "lm_head" in key]


def test_same_inputs_give_the_same_bytes(sources, tmp_path):
    for name in ("one", "two"):
        merge_checkpoints(sources, tmp_path / name, max_shard_size=100_000)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_policy_is_stored_and_checked_and_one_variant_gets_a_constant_one(sources, tmp_path):
    report = merge_checkpoints(sources, tmp_path / "merged", policy="phase")
    assert report.policy == load_policy("phase").document
    with refused("needs a variant 'w4a16'.*--policy"):
        merge_checkpoints({"fp8": sources["w8a8"], "int4": sources["w4a16"]}, tmp_path / "other")
    with refused("w4a16"):
        merge_checkpoints({"w8a8": sources["w8a8"]}, tmp_path / "other", policy="phase")
    assert not (tmp_path / "other").exists()
    report = merge_checkpoints({"w8a8": sources["w8a8"]}, tmp_path / "one")
    assert report.policy["rules"] == [{"use": "w8a8"}] and report.shared_bytes == 0


def test_incompatible_kv_caches_are_refused_or_recorded(tmp_path):
    pair = make_pair(tmp_path, change=double_keys_of_the_last_layer)
    with refused("layer 1.*k_proj"):
        merge_checkpoints(pair, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    named = [f"{name}={folder}" for name, folder in pair.items()]
    assert main(["merge", *named, "--output", str(tmp_path / "merged"), "--allow-incompatible-kv"]) == 0
    section = config_of(tmp_path / "merged")["quantization_config"]
    assert section["kv_compatibility"]["compatible"] is False and section["layered_plans"] is False
    assert "NOT interchangeable" in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_only_python_reads_as_json_is_not_written_on(tmp_path, name, number):
    source = make_checkpoint(tmp_path / "w8a8", scheme="w8a8")
    text = (source / name).read_text() if (source / name).exists() else "{\n}"
    text = text.replace("{", f'{{"layer_scales": [0.0, {number}], ', 1).replace(", \n}", "}")
    (source / name).write_text(text)
    told = "Infinity" if number == "1e999" else number
    with refused(f"{name} is not valid JSON: {told} is no number in JSON"):
        merge_checkpoints({"w8a8": source}, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_link_in_a_circle_is_one_sentence(tmp_path):
    folder = make_checkpoint(tmp_path / "w8a8", scheme="w8a8")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with refused("'config.json' cannot be the name of a file in"):
        merge_checkpoints({"w8a8": folder}, tmp_path / "merged")
    (tmp_path / "circle").symlink_to("circle")
    with refused("no such folder: .*circle"):
        merge_checkpoints({"w8a8": tmp_path / "circle"}, tmp_path / "merged")


@pytest.mark.parametrize("change", [0.0, math.inf, math.nan])
def test_what_is_written_of_incompatible_kv_caches_can_be_read_again(tmp_path, change):
    change_keys = edit_tensor(r"layers\.1\.self_attn\.k_proj", lambda w: w * change)
    try:
        pair = make_pair(tmp_path, change=in_float32(change_keys))
        merge_checkpoints(pair, tmp_path / "merged", allow_incompatible_kv=True)
    except FlexQuantError:
        assert not (tmp_path / "merged").exists()
    else:
        verify_checkpoint(tmp_path / "merged")


def test_an_output_is_overwritten_when_told_to_and_foreign_folders_and_inputs_never(sources, tmp_path):
    output = tmp_path / "merged"
    merge_checkpoints(sources, output)
    before = contents(output)
    with refused("exists.*--overwrite"):
        merge_checkpoints(sources, output)
    assert contents(output) == before
    merge_checkpoints({"w8a8": sources["w8a8"]}, output, overwrite=True)
    assert contents(output) != before
    verify_checkpoint(output)
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with refused("not a checkpoint folder"):
        merge_checkpoints(sources, tmp_path / "home", overwrite=True)
    for output in (sources["w8a8"], sources["w8a8"].parent, sources["w8a8"] / "merged"):
        with refused("overlaps the input"):
            merge_checkpoints(sources, output, overwrite=True)


def test_command_line(sources, tmp_path, capsys):
    output = str(tmp_path / "merged")
    argv = ["merge", *(f"{name}={folder}" for name, folder in sources.items()), "--output", output]
    assert main([*argv, "--json", "--max-shard-size", "0.1MB"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["output"] == output and set(result["variants"]) == {"w8a8", "w4a16"}
    bits = {name: variant["bits_per_parameter"] for name, variant in result["variants"].items()}
    assert bits["w8a8"] > bits["w4a16"]
    assert main(["inspect", output]) == 0
    assert "int4 weights (group 64), 16-bit activations" in capsys.readouterr().out
    assert main(argv) == 1 and "merge: error:" in capsys.readouterr().err
    for part in ("config", "tokenizer", "generation", "processor"):
        assert main([*argv, "--overwrite", f"--{part}-from", "fp8"]) == 1
        assert f"--{part}-from names 'fp8', but the variants are" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--policy", "w8a8", "--dtype", "float16"]) == 0
    assert config_of(tmp_path / "merged")["dtype"] == "float16" and main(["inspect", output]) == 0
    loaded = capsys.readouterr().out.partition("loaded under the default policy: ")[2]
    assert "w8a8" in loaded and "w4a16" not in loaded
    for bad in ("w8a8", "=dir", "w8a8="):
        assert main(["merge", bad, "--output", output]) == 2
        assert f"'{bad}' is not NAME=DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*argv, "--max-shard-size", "many"])
    assert stop.value.code == 2


MIB = 1 << 20


def merge(mib: int, folder: Path, hidden: int, awq: bool) -> tuple[int, int]:
    """Return the bytes of two checkpoints, and the most memory that merging them took."""
    sources, _ = make_sources(folder, mib / 1024, hidden, awq)
    nbytes = sum(file.stat().st_size for source in sources.values() for file in Path(source).iterdir())
    return nbytes, in_child(merge_once, sources, str(folder / "output"))[1]


@pytest.mark.parametrize(
    ("hidden", "awq"),
    [(2048, False), pytest.param(1024, True, marks=pytest.mark.full)],
    ids=["as it is", "converted"],
)
def test_four_times_the_model_takes_the_same_memory(hidden: int, awq: bool, tmp_path: Path) -> None:
    (small, peak), (large, higher) = (merge(mib, tmp_path / str(mib), hidden, awq) for mib in (64, 256))
    assert large - small > 150 * MIB and higher - peak < 48 * MIB


@pytest.mark.full
def test_the_benchmark_compares_merging_with_copying(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.merge", "--gib", 0.03, "--repeats", 1, "--hidden", 512]
    done = programs.run([*command, "--folder", tmp_path, "--output", tmp_path / "merge.json"], timeout=300)
    found = json.loads((tmp_path / "merge.json").read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    (merged,), (copied,) = found["seconds_merge"], found["seconds_cp"]
    assert found["merge_to_cp"] == pytest.approx(merged / copied)
    assert found["verify_to_read"] > 0 and found["peak_rss_above_interpreter_bytes"] > 0
