# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which variants' layers may be mixed in one plan: found when merging, stored, and kept to by policies.

Noted as well: variants whose linears take other inputs than the first one's, since no adapter fits both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexquant.checkpoint.merged_config import MergedConfig, read_merged_config
from flexquant.cli import main
from flexquant.merge import merge_checkpoints
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import parse_policy
from tests.checkpoints import make_checkpoint, make_pair
from tests.foreign import config_of
from tests.refusals import refused
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


def table(
    merged: MergedConfig, base: str, first_layer: str, derive: dict[str, Any] | None = None
) -> RouteTable:
    document: dict[str, Any] = {
        "schema": "flexquant.policy/v1",
        "rules": [{"use": {"default": base, "layers": {"0": first_layer}}}],
    }
    if derive is not None:
        document["derive"] = derive
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
    assert main(["inspect", str(odd_one_out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
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
    [
        (lambda state: None, ()),
        (smooth_norms(), ("other",)),
        (scale_up_to_down, ("other",)),
        (rotate_residual, ("other",)),
    ],
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
