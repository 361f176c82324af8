# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policy documents: what is read of them, the built-in ones, which one is used, and their JSON Schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import flexquant.policies
from flexquant import cli
from flexquant.documents.yaml_document import from_yaml
from flexquant.errors import FlexQuantError
from flexquant.policy import rules as policy_rules
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import DEFAULT_POLICY, choose_policy, find_policies, load_policy, parse_policy
from flexquant.policy.schema import SCHEMA, Bounds, json_schema, parse_layers
from tests import readme
from tests.policies import rules
from tests.unit.test_policy_refusals import BAD

VARIANTS = ["w8a8", "w4a16"]
FULL = """\
schema: flexquant.policy/v1
description: every key once
rules:
  - when: {phase: [mixed, prefill], tokens: {min: 16, max: 512}}
    use: w8a8
  - when:
      phase: decode
      batch_size: {max: 32}
    use:
      default: w4a16
      layers: {"0-3": w8a8, -1: fp8, -4--3: w8a8}
  - use: w8a8
"""


def test_the_policies_of_the_pages_are_valid() -> None:
    found = [
        policy_rules.parse_policy_text(text.encode(), "a page", "its") for text in readme.documents(SCHEMA)
    ]
    assert any(policy.rules for policy in found)


def test_every_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "full.yaml"
    path.write_text(FULL)
    policy = load_policy(str(path))
    assert (policy.name, policy.description) == (str(path), "every key once")
    first, second, last = policy.rules
    assert (first.when.phases, first.when.tokens) == (("prefill", "mixed"), Bounds(min=16, max=512))
    assert (first.when.batch_size.min, first.when.batch_size.max) == (1, None)
    assert (first.variant, first.layers) == ("w8a8", {})
    assert (second.when.phases, second.when.batch_size) == (("decode",), Bounds(max=32))
    assert second.variant == "w4a16"
    layers = [(parse_layers(text), variant) for text, variant in second.layers.items()]
    assert layers == [((0, 3), "w8a8"), ((-1, -1), "fp8"), ((-4, -3), "w8a8")]
    assert second.plan_text == "w4a16+w8a8[0-3,-4--3]+fp8[-1]"
    assert last.when.phases == ("prefill", "decode", "mixed")
    assert policy.variants == ("w8a8", "w4a16", "fp8")


def test_document_survives_json_and_may_have_whole_numbers_as_layers() -> None:
    policy = policy_rules.parse_policy_text(FULL.encode(), "full.yaml", "mine")
    stored = parse_policy(json.loads(json.dumps(policy.document)), "stored policy")
    assert stored.rules == policy.rules and stored.document == policy.document
    use = {"default": "w4a16", "layers": {0: "w8a8"}}
    policy = parse_policy({"schema": "flexquant.policy/v1", "rules": [{"use": use}]}, "stored policy")
    assert policy.document["rules"][0]["use"]["layers"] == {"0": "w8a8"}


def test_rules_may_share_a_yaml_alias() -> None:
    text = rules(
        "- when: {phase: decode, batch_size: {max: 8}}",
        '  use: {default: w4a16, layers: &ends {"0": w8a8}}',
        "- use: {default: w4a8, layers: *ends}",
    )
    first, last = policy_rules.parse_policy_text(text.encode(), "alias.yaml", "mine").rules
    assert [*last.layers.values()] == [*first.layers.values()] == ["w8a8"]


def test_partly_shadowed_rule_is_allowed() -> None:
    rules = [
        {"when": {"phase": "decode", "batch_size": {"max": 8}}, "use": "w4a16"},
        {"when": {"tokens": {"max": 8}}, "use": "w8a8"},
        {"when": {"phase": ["decode", "mixed"], "tokens": {"max": 9}}, "use": "w4a16"},
        {"use": "w8a8"},
    ]
    assert len(parse_policy({"schema": SCHEMA, "rules": rules}, "stored policy").rules) == 4


def test_builtin_policies_are_complete() -> None:
    by_phase = ["phase", "phase-batch", "phase-batch-layer", "phase-batch-w4a8", "fp8-phase-batch"]
    by_size = ["one-copy", "prefill-8-bit", "prefill-fp8"]
    of_one = ["fp8-from-16-bit", "int8-from-16-bit", "single-copy", "w4a16", "w4a8", "w8a8", "w8a8-from-int4"]
    assert policy_rules.builtin_policies() == sorted([*by_phase, *by_size, *of_one])
    assert DEFAULT_POLICY in policy_rules.builtin_policies()
    for name in policy_rules.builtin_policies():
        policy = load_policy(name)
        assert policy.name == name and policy.description
        assert parse_policy(policy.document, "stored policy").rules == policy.rules


def deriving(**derive: Any) -> dict[str, Any]:
    return {"schema": "flexquant.policy/v1", "derive": derive, "rules": [{"use": "w4a8"}]}


ENTRY = {"from": "w4a16", "activations": "int8"}
FP8_BY_INT8 = ENTRY | {"activations": "fp8", "weights": "int8"}


def test_derived_variants_are_read_with_weights_in_int4_unless_int8_is_said_and_survive_storing() -> None:
    for weights, is_one_copy in (({}, False), ({"weights": "int4"}, False), ({"weights": "int8"}, True)):
        policy = parse_policy(deriving(w4a8=ENTRY | weights), "stored policy")
        (derived,) = policy.derived.values()
        assert (derived.source, derived.activations, derived.is_one_copy) == ("w4a16", "int8", is_one_copy)
        assert parse_policy(policy.document, "stored policy").derived == policy.derived


@pytest.mark.parametrize(
    ("derive", "message"),
    [
        ({"w4a8": FP8_BY_INT8}, r"derive\.w4a8\.activations is 'fp8'; INT8 weights need int8"),
        ({"w4a8": ENTRY | {"weights": "fp8"}}, r"activations is 'int8'; FP8 weights need fp8"),
        ({"w4a8": ENTRY | {"weights": "fp4"}}, r"weights is \"fp4\"; give one of int4, int8, fp8"),
        ({"w4a8": ENTRY | {"activations": "int4"}}, r"activations is \"int4\"; give one of int8, fp8"),
        ({"w4a8": {"from": "w4a16"}}, r"derive\.w4a8 lacks the key 'activations'"),
        ({"w4a8": ENTRY | {"from": "w4a8"}}, r"derive\.w4a8\.from is 'w4a8', itself derived"),
        ({"W4": ENTRY}, r"derive\.W4 is wrong: 'W4' is not a"),
        ({"other": ENTRY}, r"derive\.other is used by no rule"),
        ({"w4a8": "w4a16"}, r"derive\.w4a8 is \"w4a16\"; give a mapping"),
        (["w4a8"], r"derive is \[\"w4a8\"\]; give a mapping such as w4a8"),
    ],
)
def test_wrong_derivations_are_refused(derive: Any, message: str) -> None:
    with pytest.raises(FlexQuantError, match=message):
        parse_policy({**deriving(), "derive": derive}, "stored policy")


TUNING = Path(__file__).parents[2] / "benchmarks/results/tuning"
TUNED = str(TUNING / "smollm2-135m.yaml")
STORED = load_policy("w4a16").document


def test_the_given_policy_comes_before_the_checkpoints_which_is_named_and_that_before_the_default() -> None:
    given, stored = choose_policy("w8a8", STORED), choose_policy(None, STORED)
    assert (given.name, given.variants) == ("w8a8", ("w8a8",))
    assert (stored.name, stored.variants) == ("the checkpoint's policy", ("w4a16",))
    assert choose_policy() == load_policy(DEFAULT_POLICY) and choose_policy().name == DEFAULT_POLICY
    with pytest.raises(FlexQuantError, match="the checkpoint's policy: .*rules"):
        choose_policy(None, {"schema": STORED["schema"], "rules": []})


@pytest.mark.parametrize("stored", [None, STORED])
def test_the_default_is_found_among_the_policies_that_are_compared(stored: dict | None) -> None:
    (policy,) = find_policies([policy_rules.default_name(stored)], VARIANTS, "merged", stored).values()
    assert policy.document == choose_policy(None, stored).document


FOLDER = Path(flexquant.policies.__file__).parent
FILE = FOLDER / "policy.schema.json"
OF_MEANING = ("last rule has when", "early rule without when", "batch size")
OF_MEANING += ("min above max", "layers backwards", "shadowed")
"""How the names of those refusals begin that JSON Schema cannot express."""


def test_the_schema_accepts_every_policy_that_is_shipped_or_was_tuned_and_editors_find_it() -> None:
    schema = json_schema()
    policies = sorted([*FOLDER.glob("*.yaml"), *TUNING.glob("*.yaml")])
    assert len(policies) > 10
    for path in policies:
        document = from_yaml(path.read_bytes(), path.name, "policy", ("schema", "rules")).data
        jsonschema.validate(document, schema)
    for path in FOLDER.glob("*.yaml"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first == "# yaml-language-server: $schema=policy.schema.json", path.name
        assert yaml.safe_load(path.read_bytes())["schema"] == "flexquant.policy/v1"


@pytest.mark.parametrize("text", [case[0] for case in BAD.values()], ids=BAD)
def test_the_schema_refuses_what_is_refused_but_for_meaning(text: str, request: Any) -> None:
    try:
        document = from_yaml(text.encode(), "bad.yaml", "policy", ("schema", "rules")).data
    except FlexQuantError:
        return
    with pytest.raises(FlexQuantError):
        parse_policy(document, "stored policy")
    accepted = jsonschema.Draft202012Validator(json_schema()).is_valid(document)
    assert accepted == request.node.callspec.id.startswith(OF_MEANING)


def test_the_schemas_file_is_of_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: flexquant policy schema > policies/policy.schema.json"""
    assert cli.main(["policy", "schema"]) == 0
    assert FILE.read_text(encoding="utf-8") == capsys.readouterr().out
    assert json.loads(FILE.read_text(encoding="utf-8")) == json_schema()


def test_policies_go_by_their_names_in_results(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(rules("- use: w8a8"))
    found = find_policies(["w8a8", "phase", str(mine), "stored"], VARIANTS, tmp_path, yaml.safe_load(FULL))
    assert list(found) == ["w8a8", "phase", "mine.yaml", "stored"]
    assert found["w8a8"].rules == found["mine.yaml"].rules != found["phase"].rules
    places = [found[name].place(()).partition(":")[0] for name in ("w8a8", "stored")]
    assert places == ["w8a8", "the checkpoint's policy"]
    with pytest.raises(FlexQuantError, match="'none'.*; or a variant of the checkpoint: w8a8, w4a16$"):
        find_policies(["none"], VARIANTS)
    with pytest.raises(FlexQuantError, match=f"{tmp_path} stores no policy; its .* built-in 'phase-batch'"):
        find_policies(["stored"], VARIANTS, tmp_path)


def test_a_document_has_the_derivations_that_its_rules_use() -> None:
    derived = {name: {"from": "w4a16", "activations": "int8"} for name in ("one", "other", "third")}
    policies = {}
    for name in ("one", "other"):
        document = {"schema": SCHEMA, "rules": [{"use": name}], "derive": {name: derived[name]}}
        policies[name] = parse_policy(document, name)
    in_fp8 = {"from": "w4a16", "activations": "fp8"}
    own = {"third": derived["third"], "fourth": in_fp8, "one": in_fp8}
    rules = [{"use": "w8a8"}, {"use": {"default": "one", "layers": {"0": "third"}}}]
    found = policy_rules.with_derivations({"derive": own, "rules": rules}, policies.values())
    assert found == {"derive": {name: derived[name] for name in ("one", "third")}, "rules": rules}
    plain = {"rules": [{"use": {"default": "w8a8"}}]}
    assert policy_rules.with_derivations({**plain, "derive": own}, policies.values()) == plain


@pytest.mark.parametrize(
    ("mixable", "advice"),
    [
        ([("w8a8", "fp8"), ("bf16", "int8"), ("w4a16",)], "mix w8a8 with fp8 or bf16 with int8 only, or use"),
        ([("w8a8",), ("w4a16",)], "use"),
    ],
)
def test_layers_of_variants_that_cannot_be_mixed_are_refused(mixable: Any, advice: str) -> None:
    use = {"default": "w8a8", "layers": {"0": "w4a16"}}
    policy = parse_policy({"schema": SCHEMA, "rules": [{"use": use}]}, "mine")
    problem = rf"begins a plan with layers of w4a16 and w8a8 \(.*\), but .* differ; {advice} a policy without"
    with pytest.raises(FlexQuantError, match=problem):
        build_route_table(policy, VARIANTS, 2, max_tokens=8, mixable=mixable)
