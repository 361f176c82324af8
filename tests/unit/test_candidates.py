# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The variants among which tuning chooses, and their memory."""

from dataclasses import replace

import pytest

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import StoredVariant
from flexquant.errors import FlexQuantError, UsageError
from flexquant.policy.rules import parse_policy
from flexquant.tuning.candidates import FROM_INT4, Memory, eight_bit, find_variants
from tests.policies import rules

VARIANTS = ["w8a8", "w4a16"]


def test_the_most_precise_variant_comes_first(config):
    for there in (config, replace(config, variants=dict(reversed(config.variants.items())))):
        assert list(find_variants(there, None)) == ["w8a8", "w4a16"]
    assert list(find_variants(config, ["w4a8", "w4a16", "w8a8"])) == ["w8a8", "w4a16", "w4a8"]


def test_two_ways_to_derive_a_variant_are_not_taken_for_one(config, tmp_path):
    for name, weights in (("a", "int4"), ("b", "int8")):
        derived = f"derive: {{x: {{from: w4a16, activations: int8, weights: {weights}}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(rules("- use: x") + derived)
    with pytest.raises(UsageError, match="b.yaml and another policy derive 'x' in different ways"):
        find_variants(config, [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")])


def test_the_8_bit_variant_is_neither_that_in_16_bit_nor_one_that_only_stores_8(config):
    """Activations of 8 bits are what makes it fast."""
    stored = dict(config.variants)
    section = stored["w8a8"].quantization_config
    groups = {
        "bf16": {},
        "w8a16": {"g": {**section["config_groups"]["group_0"], "input_activations": None}},
        "w4a16": stored["w4a16"].quantization_config["config_groups"],
        "w8a8": section["config_groups"],
    }
    every = {v: StoredVariant("", section | {"config_groups": own}, True, False) for v, own in groups.items()}
    for names, expected in (
        (["bf16", "w8a16", "w8a8", "w4a16", FROM_INT4], "w8a8"),
        (["bf16", "w8a16", "w4a16", FROM_INT4], "w8a16"),
        (["bf16", "w4a16", FROM_INT4], None),
    ):
        some = replace(config, variants={name: own for name, own in every.items() if name in names})
        assert eight_bit(find_variants(some, names), some) == expected


@pytest.mark.parametrize(
    ("there", "names", "message"),
    [
        (VARIANTS, ["w8a8", "phase"], "'phase' runs passes or layers in several variants"),
        (VARIANTS, ["w8a8"], "there is nothing to choose from but w8a8"),
        (VARIANTS, ["w8a8", "w2a2"], "unknown policy 'w2a2'"),
        *(
            (["w8a8"], ["w8a8", derived], f"'w4a16', from which '{derived}' is derived, is not a variant")
            for derived in ("w4a8", FROM_INT4)
        ),
    ],
)
def test_what_cannot_be_tuned(config, there, names, message):
    with pytest.raises(FlexQuantError, match=message):
        find_variants(replace(config, variants={name: config.variants[name] for name in there}), names)


def test_memory_is_divided_by_weights_and_evenly_beyond(merged):
    memory = Memory(total=900, shared=100, own={"w8a8": {"w8a8": 400}, "w4a16": {"w4a16": 200}})
    assert memory.requests(["w8a8"], 10) == 40 and memory.requests(["w8a8", "w4a16"], 10) == 20
    shares = [memory.utilisation(name) for name in memory.own]
    assert shares == pytest.approx([0.9 * 550 / 900, 0.9 * 350 / 900])
    checkpoint = MergedCheckpoint.open(merged)
    variants = find_variants(checkpoint.merged, VARIANTS)
    one, two = (Memory.of(checkpoint, variants, devices) for devices in (1, 2))
    assert two.total == 2 * one.total > 0 and two.own == one.own


def test_one_copy_is_counted_once(merged):
    """A variant that computes its weights adds none, and a plan with layers of two has a part of each."""
    checkpoint = MergedCheckpoint.open(merged)
    variants = find_variants(checkpoint.merged, ["w8a8", "w4a16", FROM_INT4])
    half = {"default": FROM_INT4, "layers": {"0": "w8a8"}}
    document = variants[FROM_INT4].document | {"rules": [{"use": half}]}
    memory = Memory.of(checkpoint, variants | {"half": parse_policy(document, "stored policy")}, devices=1)
    assert memory.own[FROM_INT4] == memory.own["w4a16"]
    assert memory.own["half"]["w8a8"] * 2 == pytest.approx(memory.own["w8a8"]["w8a8"])
    more = ([], [FROM_INT4], ["half"], ["half", "w8a8"])
    (room, same, half_room, both) = (memory.requests(["w4a16", *names], request=1) for names in more)
    assert room == same > half_room > both and list(memory.saved([FROM_INT4])) == ["w8a8"]
    assert memory.saved(["half"]) == {}
