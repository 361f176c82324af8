# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which variants' layers may be mixed in one plan, and whose linears take other inputs; bytes by layers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from flexquant.checkpoint.merged_config import MergedConfig, read_merged_config
from flexquant.checkpoint.module_names import describe_ranges, layer_number
from flexquant.checkpoint.weight_bytes import by_range, describe_bytes
from flexquant.cli import main
from flexquant.merge import merge_checkpoints
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import parse_policy
from tests.checkpoints import StateDict, make_checkpoint, make_pair
from tests.foreign import config_of
from tests.policies import rules
from tests.publishers import edits
from tests.refusals import refused
from tests.tied_heads import make_tied_pair
from tests.unit.edits import in_float32, rotate_residual, scale_up_to_down, smooth_norms

VARIANTS = ("w8a8", "w4a16", "spin")


@pytest.fixture(scope="module")
def odd_one_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two roundings and one variant with a rotated residual stream."""
    folder = tmp_path_factory.mktemp("odd")
    sources = make_pair(folder)
    rotated = make_checkpoint(folder / "spin", scheme="w4a16", transform=in_float32(rotate_residual))
    merge_checkpoints({**sources, "spin": rotated}, folder / "merged")
    return folder / "merged"


def table(merged: MergedConfig, base: str, first_layer: str, derive: Any = None) -> RouteTable:
    rules = [{"use": {"default": base, "layers": {"0": first_layer}}}]
    document = {"schema": "flexquant.policy/v1", "rules": rules, **({"derive": derive} if derive else {})}
    policy = parse_policy(document, "test")
    return build_route_table(policy, merged.variants, 2, max_tokens=8, mixable=merged.mixable_groups)


def test_one_odd_variant_does_not_forbid_mixing_two_good_ones(odd_one_out):
    merged, _ = read_merged_config(odd_one_out)
    assert [plan.name for plan in table(merged, "w8a8", "w4a16").plans] == ["w4a16+w8a8[1]"]
    with refused("spin and w8a8 .*residual.*mix w8a8 with w4a16 only, or use a pol"):
        table(merged, "w8a8", "spin")


def test_a_derived_variant_mixes_like_the_one_it_is_from(odd_one_out):
    merged, _ = read_merged_config(odd_one_out)
    derive = {"w4a8": {"from": "w4a16", "activations": "int8"}}
    assert table(merged, "w8a8", "w4a8", derive).plans[0].variants == ("w4a8", "w8a8")
    derive["w4a8"]["from"] = "spin"
    assert table(merged, "spin", "w4a8", derive).plans[0].variants == ("w4a8", "spin")
    with refused("residual streams"):
        table(merged, "w8a8", "w4a8", derive)


def test_the_card_and_inspect_name_the_variants_that_mix(odd_one_out, capsys):
    assert main(["inspect", str(odd_one_out)]) == 0
    assert "layers of different variants in one plan: only of w8a8, w4a16\n" in capsys.readouterr().out
    assert "in one plan: only of w8a8, w4a16." in (odd_one_out / "README.md").read_text()


def test_bits_per_parameter_count_what_variants_share(odd_one_out, capsys):
    report = inspect(odd_one_out, capsys)
    found = report["variants"]["w8a8"]
    others = sum(v["own_bytes"] for name, v in report["variants"].items() if name != "w8a8")
    bits = 8 * (report["total_bytes"] - others) / found["parameters"]
    assert found["bits_per_parameter"] == pytest.approx(bits)


def test_groups_are_stored_and_said_not_to_be_one(odd_one_out):
    section = config_of(odd_one_out)["quantization_config"]
    assert section["schema_version"] == 1 and section["layered_plans"] is False
    assert section["mixable"] == [["w8a8", "w4a16"], ["spin"]]


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
@pytest.mark.parametrize(
    ("edit", "expected"),
    [(lambda state: None, ()), (smooth_norms(), ("other",))]
    + [(scale_up_to_down, ("other",)), (rotate_residual, ("other",))],
    ids=["plain", "norms smoothed", "up to down smoothed", "rotated"],
)
def test_a_variant_whose_linears_take_other_inputs_is_noted(tmp_path, edit, expected, scheme):
    sources = {
        "w4a16": make_checkpoint(tmp_path / "first", scheme="w4a16"),
        "w8a8": make_checkpoint(tmp_path / "alike", scheme="w8a8"),
        "other": make_checkpoint(tmp_path / "other", scheme=scheme, transform=in_float32(edit)),
    }
    merge_checkpoints(sources, tmp_path / "merged")
    assert read_merged_config(tmp_path / "merged")[0].rescaled == expected


def test_neighbours_are_one_range():
    assert describe_ranges([29, 3, 0, 2, 1, 31]) == "0-3,29,31"
    assert by_range({0: 1, 1: 2, 3: 4, None: 8}) == {"0-1": 3, "3": 4, "": 8} and by_range({}) == {}


def test_bytes_are_told_with_the_layers():
    sizes = {"w8a8": {"0-3": 12 << 20}, "w4a16": {"4": 1 << 19, "": 3 << 29}, "shared": {"": 0}}
    found = describe_bytes(sizes)
    of_int4 = "w4a16 layers 4: 512.0 KiB, w4a16 outside layers: 1.5 GiB"
    assert found == f"w8a8 layers 0-3: 12.0 MiB, {of_int4}, shared: 0 bytes"


@pytest.mark.parametrize(
    ("name", "number"),
    [("model.layers.3.mlp.down_proj.weight", 3), ("model.layers.12", 12)]
    + [("model.language_model.layers.0.self_attn", 0), ("model.vision_model.encoder.layers.3.mlp", None)]
    + [("model.embed_tokens.weight", None), ("lm_head", None)],
)
def test_the_decoder_layer_of_a_name(name, number):
    assert layer_number(name) == number


def sizes_of(folder: Path) -> Counter[tuple[str, int | None, bool]]:
    """Return (prefix, decoder layer, whether of linears) -> bytes that a merged checkpoint stores."""
    sizes: Counter[tuple[str, int | None, bool]] = Counter()
    for shard in folder.glob("*.safetensors"):
        for key, tensor in load_file(shard).items():
            prefix, _, name = key.partition(".")
            sizes[prefix, layer_number(name), "_proj." in name] += tensor.nbytes
    return sizes


def merge_by_policy(sources: dict[str, Path], *lines: str) -> Path:
    """Merge sources under a policy with rules in these lines, and W4A8 derived."""
    folder = sources["w8a8"].parent
    policy = {**yaml.safe_load(rules(*lines)), "derive": {"w4a8": {"from": "w4a16", "activations": "int8"}}}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    merge_checkpoints(sources, folder / "merged", policy=str(folder / "policy.yaml"))
    return folder / "merged"


def test_inspect_says_what_the_default_policy_loads(tmp_path, capsys):
    """Each variant's bytes are those of its layers alone; a derived variant's are those of its source."""
    rule = '- use: {default: w8a8, layers: {"0": w4a8, "2": w4a16}}'
    folder = merge_by_policy(make_pair(tmp_path, num_layers=4), rule)
    assert main(["inspect", str(folder)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("loaded under the default policy: w4a8 layers 0: ")
    loaded, sizes = inspect(folder, capsys)["loaded"], sizes_of(folder)

    def stored(prefix: str, layer: int) -> int:
        return sizes[prefix, layer, False] + sizes[prefix, layer, True]

    assert loaded["w8a8"] == {"1": stored("w8a8", 1), "3": stored("w8a8", 3)}
    assert loaded["w4a16"] == {"2": stored("w4a16", 2)} and loaded["w4a8"] == {"0": stored("w4a16", 0)}
    assert sum(loaded["shared"].values()) == sum(size for key, size in sizes.items() if key[0] == "shared")


def test_inspect_says_why_the_default_policy_loads_nothing(tmp_path, capsys):
    merge_checkpoints({"fp8": make_checkpoint(tmp_path / "fp8", scheme="fp8")}, tmp_path / "merged")
    policy = config_of(tmp_path / "merged")["quantization_config"]["policy"]
    edits.section(policy=policy | {"rules": [{"use": "w8a8"}]})(tmp_path / "merged")
    assert main(["inspect", str(tmp_path / "merged")]) == 0
    out = capsys.readouterr().out
    assert "loaded under the default policy: unknown, since the policy cannot be served: " in out
    assert "names the variant 'w8a8', but the checkpoint has fp8" in out


def inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", str(folder), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize("heads", [("copy", None), ("copy", "copy")])
def test_a_copy_of_the_embedding_is_stored_and_not_loaded(heads, tmp_path, capsys):
    found = []
    for copies in (heads, (None, None)):
        folder = tmp_path / str(copies)
        merge_checkpoints(make_tied_pair(folder, *copies), folder / "merged")
        found.append(inspect(folder / "merged", capsys))
    with_copy, without = found
    assert with_copy["total_bytes"] > without["total_bytes"]
    assert with_copy["loaded"] == without["loaded"]
    assert with_copy["bytes_16bit"] == without["bytes_16bit"]
    counts = [{name: v["parameters"] for name, v in report["variants"].items()} for report in found]
    assert counts[0] == counts[1]


def test_a_derived_variant_counts_what_its_source_does_not_hold_for_it(tmp_path, capsys):
    """Both take a layer and a norm, of which only the INT4 linears are held twice."""

    def rescale(state: StateDict) -> StateDict:
        for name in state:
            if "post_attention_layernorm" in name or name == "model.norm.weight":
                state[name] = state[name] / 2
            elif "gate_proj" in name or "up_proj" in name or "lm_head" in name:
                state[name] = state[name] * 2
        return state

    decode = '- {when: {phase: decode}, use: {default: w4a16, layers: {"1": w4a8}}}'
    folder = merge_by_policy(make_pair(tmp_path, change=rescale), decode, "- use: w4a8")
    loaded = inspect(folder, capsys)["loaded"]
    sizes = {key[1:]: size for key, size in sizes_of(folder).items() if key[0] == "w4a16"}
    assert all(sizes[part] for part in ((0, False), (0, True), (1, False), (None, False)))
    assert loaded["w4a16"] == {"0": sizes[0, False] + sizes[0, True], "": sizes[None, False]}
    assert loaded["w4a8"] == {"0-1": sizes[0, True] + sizes[1, True] + sizes[1, False]}
