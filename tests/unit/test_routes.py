# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
import json
from itertools import product
from typing import Any

import pytest

from flexquant.errors import FlexQuantError
from flexquant.policy.plans import Plan
from flexquant.policy.routes import RouteChange, RouteTable, build_route_table, route_changes
from flexquant.policy.rules import Policy, builtin_policies, load_policy, parse_policy
from flexquant.policy.schema import PHASES
from tests.refusals import refused

VARIANTS = ("w8a8", "w4a16")
OF_4 = "of this model's 4 layers"
EVERY = (*VARIANTS, "fp8", "bf16")
"""Those of all built-in policies."""


def policy(*rules: dict[str, Any]) -> Policy:
    return parse_policy({"schema": "flexquant.policy/v1", "rules": list(rules)}, source="p.yaml")


def table(by: str | Policy, num_layers: int = 2, max_tokens: int = 64, **options: Any) -> RouteTable:
    """Return the table of a policy, for VARIANTS unless ``variants`` names others."""
    by = load_policy(by) if isinstance(by, str) else by
    return build_route_table(by, options.pop("variants", VARIANTS), num_layers, max_tokens, **options)


def decode(use: Any, **batch_size: int) -> dict[str, Any]:
    return {"when": {"phase": "decode", "batch_size": batch_size}, "use": use}


def layered(**layers: str) -> dict[str, Any]:
    return {"default": "w4a16", "layers": layers}


def rows(table: RouteTable, phase: str) -> list[tuple[int, int, str]]:
    return [(i.min_tokens, i.max_tokens, i.plan.name) for i in table.intervals(phase)]


@pytest.mark.parametrize(
    ("name", "in_decode", "other"),
    [
        ("w8a8", [(1, 2048, "w8a8")], "w8a8"),
        ("w4a16", [(1, 2048, "w4a16")], "w4a16"),
        ("phase", [(1, 2048, "w4a16")], "w8a8"),
        ("phase-batch", [(1, 32, "w4a16"), (33, 2048, "w8a8")], "w8a8"),
        ("phase-batch-layer", [(1, 32, "w4a16+w8a8[0-3,29]"), (33, 2048, "w8a8")], "w8a8"),
    ],
)
def test_builtin_tables(name: str, in_decode: list[tuple[int, int, str]], other: str) -> None:
    found = table(name, 30, 2048)
    assert rows(found, "decode") == in_decode
    assert rows(found, "prefill") == rows(found, "mixed") == [(1, 2048, other)]
    assert [plan.name for plan in found.plans] == [*dict.fromkeys([other, *(plan for *_, plan in in_decode)])]


def test_layers_of_the_layered_builtin_and_the_first_layer_counted_from_the_end() -> None:
    found = table("phase-batch-layer", 30)
    plan = found.lookup("decode", 1)
    assert plan.layers == ("w8a8",) * 4 + ("w4a16",) * 25 + ("w8a8",)
    assert plan.variants == ("w8a8", "w4a16")
    assert found.lookup("decode", 33) == Plan("w8a8", ("w8a8",) * 30)
    found = table(policy({"use": layered(**{"-4": "w8a8"})}), 4)
    assert found.lookup("decode", 1).layers == ("w8a8", "w4a16", "w4a16", "w4a16")


def test_lookup_at_the_edges_and_of_a_rule_for_one_size_alone() -> None:
    found = table("phase-batch")
    names = {tokens: found.lookup("decode", tokens).name for tokens in (1, 32, 33, 64, 65, 10**9)}
    assert names == {1: "w4a16", 32: "w4a16", 33: "w8a8", 64: "w8a8", 65: "w8a8", 10**9: "w8a8"}
    p = policy(decode("w4a16", max=1), decode("fp8", min=5, max=5), {"use": "w8a8"})
    found = table(p, 1, 9, variants=p.variants)
    assert rows(found, "decode") == [(1, 1, "w4a16"), (2, 4, "w8a8"), (5, 5, "fp8"), (6, 9, "w8a8")]


def test_first_matching_rule_decides() -> None:
    p = policy(
        {"when": {"phase": "mixed", "tokens": {"min": 10, "max": 20}}, "use": "w4a16"},
        {"when": {"phase": ["mixed", "prefill"], "tokens": {"min": 15, "max": 30}}, "use": "w8a8"},
        {"use": "fp8"},
    )
    found = table(p, 1, 40, variants=p.variants)
    assert rows(found, "mixed") == [(1, 9, "fp8"), (10, 20, "w4a16"), (21, 30, "w8a8"), (31, 40, "fp8")]
    assert rows(found, "prefill") == [(1, 14, "fp8"), (15, 30, "w8a8"), (31, 40, "fp8")]
    assert rows(found, "decode") == [(1, 40, "fp8")]


def test_lookup_agrees_with_the_rules_everywhere() -> None:
    p = policy(
        decode("w4a16", min=3, max=5),
        {"when": {"tokens": {"min": 7, "max": 11}}, "use": "fp8"},
        decode("w4a8", max=9),
        {"use": "w8a8"},
    )
    for tokens_per_sequence in (1, 2, 4):
        found = table(p, 1, 50, variants=p.variants, tokens_per_sequence=tokens_per_sequence)
        for phase in PHASES:
            for tokens in range(1, 51):
                batch_size = (tokens + tokens_per_sequence - 1) // tokens_per_sequence
                expected = next(r.variant for r in p.rules if r.matches(phase, tokens, batch_size))
                assert found.lookup(phase, tokens).name == expected


def test_batch_size_counts_sequences_with_speculation_and_max_tokens_limits_decode_too() -> None:
    found = table("phase-batch", max_tokens=512, tokens_per_sequence=4)
    assert rows(found, "decode") == [(1, 128, "w4a16"), (129, 512, "w8a8")]
    assert found.lookup("decode", 127).name == "w4a16"
    assert rows(table("phase-batch", max_tokens=16, max_decode_tokens=256), "decode") == [(1, 16, "w4a16")]


@pytest.mark.parametrize(("tokens_per_sequence", "last"), [(1, 32), (2, 64)])
def test_unreachable_plans_are_left_out(tokens_per_sequence: int, last: int) -> None:
    others = {"when": {"phase": ["prefill", "mixed"]}, "use": "w4a16"}
    p = policy(others, decode("w4a16", max=32), {"use": "w8a8"})
    limit = 32 * tokens_per_sequence
    found = table(p, 2, 2048, tokens_per_sequence=tokens_per_sequence, max_decode_tokens=limit)
    assert [plan.name for plan in found.plans] == ["w4a16"]
    assert rows(found, "decode") == [(1, last, "w4a16")]
    assert found.lookup("decode", last + 1).name == "w4a16"


def test_equal_plans_of_different_rules_are_one() -> None:
    p = policy(
        decode(layered(**{"0": "w8a8", "3": "w8a8"}), max=4),
        decode("w4a16", max=8),
        decode(layered(**{"0": "w8a8", "-1": "w8a8"}), max=16),
        decode({"default": "w8a8", "layers": {"1-2": "w4a16"}}, max=32),
        {"use": layered(**{"0--1": "w8a8"})},
    )
    found = table(p, 4)
    mixed = ("w8a8", "w4a16", "w4a16", "w8a8")
    assert [plan.layers for plan in found.plans] == [("w8a8",) * 4, mixed, ("w4a16",) * 4]
    assert [plan.name for plan in found.plans] == (names := ["w8a8", "w8a8+w4a16[1-2]", "w4a16"])
    expected = [(1, 4, names[1]), (5, 8, names[2]), (9, 32, names[1]), (33, 64, names[0])]
    assert rows(found, "decode") == expected


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ({"0-1": "w8a8"}, "w4a16+w8a8[0-1]"),
        ({"-2--1": "w8a8", "0": "fp8"}, "w4a16+fp8[0]+w8a8[4-5]"),
        ({"0": "w8a8", "2": "w8a8"}, "w4a16+w8a8[0,2]"),
        ({"1--2": "w8a8"}, "w8a8+w4a16[0,5]"),
    ],
)
def test_layered_plan_names(layers: dict[str, str], name: str) -> None:
    found = table(policy({"use": layered(**layers)}), 6, 8, variants=[*VARIANTS, "fp8"])
    assert [plan.name for plan in found.plans] == [name]


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        ("fp8", " names the variant 'fp8', but the checkpoint has w4a16, w8a8"),
        (layered(**{"0": "fp8"}), ".layers.0 names the variant 'fp8'"),
        ({"default": "fp8", "layers": {"0": "w8a8"}}, ".default names the variant 'fp8'"),
        (layered(**{"0-4": "w8a8"}), ".layers.0-4 names layer 4, but the model has 4 layers"),
        (layered(**{"-5": "w8a8"}), ".layers.-5 names layer -5, but the model has 4 layers"),
        (layered(**{"0-2": "w8a8", "-2": "w8a8"}), f'.layers.-2 overlaps "0-2": both name layer 2 {OF_4}'),
        (layered(**{"3--2": "w8a8"}), f".layers.3--2 runs from layer 3 back to 2 {OF_4}"),
    ],
)
def test_policy_that_does_not_fit_the_model_is_refused(use: Any, problem: str) -> None:
    with pytest.raises(FlexQuantError) as error:
        table(policy(decode(use, max=8), {"use": "w8a8"}), 4)
    assert str(error.value).startswith(f"p.yaml: rules[0].use{problem}")


def test_builtin_that_does_not_fit_is_named_with_its_line() -> None:
    with refused(r"^built-in policy phase, line \d+: rules\[0\].use names .* has w8a8;"):
        table("phase", 4, variants=["w8a8"])


APART = [[name] for name in VARIANTS]


def test_where_residual_streams_differ_a_layered_plan_is_refused_and_pure_ones_are_allowed() -> None:
    with pytest.raises(FlexQuantError, match=r"line \d+: rules\[0\].*residual.*without 'layers'"):
        table("phase-batch-layer", 30, mixable=APART)
    p = policy(decode(layered(**{"0-1": "w4a16"}), max=8), {"use": "w8a8"})
    assert [plan.name for plan in table(p, mixable=APART).plans] == ["w8a8", "w4a16"]


DERIVE = {"w4a8": {"from": "w4a16", "activations": "int8"}}


def test_derived_variant_can_be_routed_to() -> None:
    found = table("phase-batch-w4a8", 4)
    assert rows(found, "decode") == [(1, 32, "w4a16"), (33, 64, "w4a8")]
    assert {name: d.source for name, d in found.derived.items()} == {"w4a8": "w4a16"}


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (("w8a8", "w4a16", "w4a8"), "derives 'w4a8', but the checkpoint has a variant of that name"),
        (("w8a8",), "derives 'w4a8' from 'w4a16', but the checkpoint has w8a8; derive from one of those"),
    ],
)
def test_derivation_that_does_not_fit_the_checkpoint(variants: tuple[str, ...], message: str) -> None:
    document = {"schema": "flexquant.policy/v1", "derive": DERIVE, "rules": [{"use": "w4a8"}]}
    derive = parse_policy(document, "stored policy")
    with pytest.raises(FlexQuantError, match=message):
        table(derive, 4, variants=variants)


def table_of(*rules: dict[str, Any], **options: Any) -> RouteTable:
    return table(policy(*rules), 4, 256, **options)


PREFILL = {"when": {"phase": "prefill"}, "use": "w8a8"}


def names(table: RouteTable, tokens: int) -> list[str]:
    return [plan.name for plan in table.reachable(tokens)]


def test_reachable_plans_of_a_size_are_those_of_the_phases_that_it_can_hold() -> None:
    """One token is a decode pass; two may be a prompt; three a prompt beside a decoding sequence."""
    mixed = {"when": {"phase": "mixed"}, "use": layered(**{"0": "w8a8"})}
    table = table_of(PREFILL, mixed, {"use": "w4a16"}, max_decode_tokens=64)
    assert names(table, 1) == ["w4a16"] and names(table, 2) == ["w8a8", "w4a16"]
    assert names(table, 3) == names(table, 64) == ["w8a8", "w4a16", "w4a16+w8a8[0]"]
    assert names(table, 65) == ["w8a8", "w4a16+w8a8[0]"]
    table = table_of(PREFILL, {"use": "w4a16"}, max_decode_tokens=12, tokens_per_sequence=3)
    assert names(table, 3) == ["w4a16"]
    assert all(names(table, tokens) == ["w8a8", "w4a16"] for tokens in (4, 12, 13))


@pytest.mark.parametrize("name", ["w8a8", "single-copy", "phase", "phase-batch"])
def test_whether_the_size_alone_decides(name: str) -> None:
    assert table(name, 30, 512, max_decode_tokens=64).ignores_phase() is (name in ("w8a8", "single-copy"))


def test_a_plan_of_mixed_passes_alone_depends_on_the_phase() -> None:
    mixed = {"when": {"phase": "mixed"}, "use": "w8a8"}
    assert not table_of(mixed, {"use": "w4a16"}, max_decode_tokens=64).ignores_phase()


def test_size_alone_decides_where_phases_differ_only_beyond_the_largest_decode_batch() -> None:
    decode_rule = {"when": {"phase": "decode"}, "use": "w8a8"}
    rules = [decode_rule, {"when": {"tokens": {"max": 64}}, "use": "w8a8"}, {"use": "w4a16"}]
    assert table_of(*rules, max_decode_tokens=64).ignores_phase()
    assert not table_of(*rules, max_decode_tokens=65).ignores_phase()


def test_the_largest_decode_batch_bounds_decode_alone() -> None:
    p = policy({"when": {"tokens": {"max": 64}}, "use": "w4a16"}, {"use": "w8a8"})
    found = table(p, 2, 2048, max_decode_tokens=64)
    assert rows(found, "decode") == [(1, 64, "w4a16")]
    assert rows(found, "prefill") == rows(found, "mixed") == [(1, 64, "w4a16"), (65, 2048, "w8a8")]


@pytest.mark.parametrize("name", builtin_policies())
def test_a_table_survives_the_way_to_a_worker(name: str) -> None:
    found = table(name, 30, 512, variants=EVERY, tokens_per_sequence=2)
    again = RouteTable.from_json(json.loads(json.dumps(found.to_json())))
    assert (again.plans, again.derived) == (found.plans, found.derived)
    assert all(again.intervals(phase) == found.intervals(phase) for phase in PHASES)
    assert again.tokens_per_sequence == 2 and again.to_json() == found.to_json()


@pytest.mark.parametrize("name", builtin_policies())
def test_a_clipped_table_is_the_one_that_is_built_with_the_limit(name: str) -> None:
    def built(limit: int | None) -> RouteTable:
        return table(name, 30, 512, variants=EVERY, max_decode_tokens=limit)

    for limit in (1, 32, 33, 64, 512, 600):
        assert built(None).up_to(limit).to_json() == built(limit).to_json()
        assert built(limit).intervals("decode")[-1].max_tokens == min(limit, 512)
        assert built(None).up_to(limit).plans == built(limit).plans


@pytest.mark.parametrize(("before", "after"), list(product(builtin_policies(), repeat=2)))
def test_every_pass_that_changes_is_told_and_no_other(before: str, after: str) -> None:
    old, new = (table(name, 6, 96, variants=EVERY, max_decode_tokens=64) for name in (before, after))
    told = {
        (change.phase, tokens): (change.before, change.after)
        for change in route_changes(old, new)
        for tokens in range(change.min_tokens, change.max_tokens + 1)
    }
    expected = {}
    for phase in PHASES:
        for tokens in range(1, old.intervals(phase)[-1].max_tokens + 1):
            plans = old.lookup(phase, tokens).name, new.lookup(phase, tokens).name
            if plans[0] != plans[1]:
                expected[phase, tokens] = plans
    assert told == expected


def test_neighbouring_passes_are_told_together() -> None:
    def upto(most: int) -> RouteTable:
        return table(policy(decode("a", max=most), {"use": "b"}), variants=["a", "b"])

    assert route_changes(upto(8), upto(20)) == [RouteChange("decode", 9, 20, "b", "a")]
    assert route_changes(upto(8), upto(8)) == []
