# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policy documents that are refused: which line, what is wrong, what to do; and what YAML is read as."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from flexquant.documents.results import digest_of
from flexquant.documents.yaml_document import from_yaml, read_named
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import builtin_policies, load_policy, parse_policy, parse_policy_text
from tests.policies import rules
from tests.refusals import refused

DATES = b"possible: 2024-02-03\nimpossible: 2024-13-40\n"


def test_dates_are_text_whatever_changed_pyyamls_loader() -> None:
    """vLLM imports lm-format-enforcer for structured output, in the midst of serving."""
    import_module("lmformatenforcer.external.jsonschemaobjectutil")
    assert yaml.safe_load(DATES)["impossible"] == "2024-13-40", "it no longer changes PyYAML: drop this test"
    data = from_yaml(DATES, "a test", "policy", []).data
    assert data == {"possible": "2024-02-03", "impossible": "2024-13-40"}


def test_dates_are_text_where_nothing_changed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    date = "tag:yaml.org,2002:timestamp"
    monkeypatch.setitem(yaml.SafeLoader.yaml_constructors, date, yaml.SafeLoader.construct_yaml_timestamp)
    with pytest.raises(ValueError, match="month must be"):
        yaml.safe_load(DATES)
    data = from_yaml(DATES, "a test", "policy", []).data
    assert data == {"possible": "2024-02-03", "impossible": "2024-13-40"}


@pytest.mark.parametrize("number", ["010", "-010", "0_7", "00", "1:30", "-1:30", "1:30.5", "12:30:45"])
def test_a_number_that_only_yaml_1_1_reads_to_another_base_is_refused(number: str) -> None:
    with refused(rf"line 2: b is '{number}'.*YAML 1.1 takes it for .*quote it"):
        from_yaml(f"a: 1\nb: {number}\n".encode(), "a test", "policy", [])


@pytest.mark.parametrize(
    ("written", "read"),
    [("0", 0), ("10", 10), ("-3", -3), ("08", "08"), ("07.5", 7.5), ("'010'", "010"), ('"1:30"', "1:30")],
)
def test_a_number_that_can_be_read_in_one_way_is_read(written: str, read: object) -> None:
    assert from_yaml(f"a: {written}\n".encode(), "a test", "policy", []).data == {"a": read}


def test_one_content_has_one_digest_whatever_the_order_of_its_keys() -> None:
    assert digest_of({"a": [1, 2], "b": {"c": 3, "d": 4}}) == digest_of({"b": {"d": 4, "c": 3}, "a": [1, 2]})
    assert digest_of({"a": [1, 2]}) != digest_of({"a": [2, 1]})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine", "unknown policy 'mine': the built-in ones are"),
        ("folder/mine", "folder/mine: the policy file cannot be read"),
        ("mine.yml", "mine.yml: the policy file cannot be read"),
    ],
)
def test_a_path_is_told_from_a_name(name: str, problem: str) -> None:
    with refused(f"^{problem}"):
        read_named(name, "flexquant.policies", "policy")


CONDITIONS = {
    "when empty": ("{}", " is empty ... phase,"),
    "unknown phase": (
        "{phase: [decode, prefil]}",
        '.phase is ["decode", "prefil"] ... prefill, decode, mixed',
    ),
    "no phase": ("{phase: []}", ".phase is [] ... prefill,"),
    "phase a bool": ("{phase: on}", ".phase is true ... prefill,"),
    "batch size beside prefill": (
        "{phase: [decode, mixed], batch_size: {max: 4}}",
        ".batch_size is for a rule with 'phase: decode' only, but this one has decode, mixed ... 'tokens'",
    ),
    "batch size without phase": ("{batch_size: {max: 4}}", ".batch_size ... use 'tokens' instead"),
    "tokens a number": ("{tokens: 4}", ".tokens is 4 ... min, max"),
    "tokens empty": ("{tokens: {}}", ".tokens is empty ... min, max"),
    "bound zero": ("{tokens: {min: 0}}", ".tokens.min is 0 ... at least 1"),
    "bound a bool": ("{tokens: {max: true}}", ".tokens.max is true ... whole number"),
    "bound a fraction": ("{tokens: {max: 1.5}}", ".tokens.max is 1.5 ... whole number"),
    "bound a text": ('{tokens: {max: "8"}}', '.tokens.max is "8" ... whole number'),
    "min above max": (
        "{phase: decode, batch_size: {min: 9, max: 8}}",
        ".batch_size has min 9 above max 8 ... correct one",
    ),
    "an octal number": (
        "{phase: decode, batch_size: {max: 010}}",
        ".batch_size.max is '010', which cannot be read (YAML 1.1 takes it for 8 ... correct or quote it",
    ),
    "a number to the base of 60": (
        "{tokens: {min: 1:30}}",
        ".tokens.min is '1:30', which cannot be read (YAML 1.1 takes it for 90 ... correct or quote it",
    ),
    "date for a number": ("{tokens: {max: 2024-13-40}}", '.tokens.max is "2024-13-40" ... whole number'),
}
"""Conditions of the first rule, in line 3, and what follows ``rules[0].when`` in the message."""
USES = {
    "use a number": ("8", " is 8 ... name of a variant"),
    "use a list": ("[w8a8]", ' is ["w8a8"] ... name of a variant'),
    "use without layers": ("{default: w8a8}", " lacks the key 'layers' ... default,"),
    "use without default": ('{layers: {"0": w8a8}}', " lacks the key 'default' ... default, layers"),
    "layers empty": ("{default: w8a8, layers: {}}", '.layers is {} ... "0-3": w8a8'),
    "layers a list": ("{default: w8a8, layers: [0, 1]}", '.layers is [0, 1] ... "0-3": w8a8'),
    "layers with a leading zero": (
        "{default: w8a8, layers: {010: w4a16}}",
        '.layers.010 does not name layers ... "0-3"',
    ),
    "layers backwards": (
        '{default: w8a8, layers: {"3-0": w4a16}}',
        '.layers.3-0 runs backwards ... write "0-3"',
    ),
    "layer variant a number": ('{default: w8a8, layers: {"0": 4}}', ".layers.0 is 4 ... name of a variant"),
}
"""What the only rule uses, in line 3, and what follows ``rules[0].use`` in the message."""
BAD = {
    **{
        name: (rules(f"- when: {text}", "  use: w8a8", "- use: w8a8"), f"3: rules[0].when{told}")
        for name, (text, told) in CONDITIONS.items()
    },
    **{name: (rules(f"- use: {text}"), f"3: rules[0].use{told}") for name, (text, told) in USES.items()},
    "use not a variant name": (rules("- use: W8A8"), "3: 'W8A8' is not a variant name ... lower-case"),
    "unknown tag": (rules("- use: !python/name:os.system x"), "3: not valid YAML ... correct the syntax"),
    "unknown top key": (
        "schema: flexquant.policy/v1\nrule: []\n",
        "2: rule is an unknown key ... schema, rules, description",
    ),
    "no schema": ("rules:\n  - use: w8a8\n", "1: lacks the key 'schema' ... schema, rules"),
    "no rules": ("schema: flexquant.policy/v1\n", "1: lacks the key 'rules' ... schema, rules"),
    "newer schema": (
        "schema: flexquant.policy/v2\nrules: [{use: w8a8}]\n",
        "1: schema is \"flexquant.policy/v2\" ... 'flexquant.policy/v1'",
    ),
    "not a mapping": ("- use: w8a8\n", "1: the policy is [ ... schema, rules, description"),
    "description not text": (
        "schema: flexquant.policy/v1\ndescription: 3\nrules: [{use: w8a8}]\n",
        "2: description is 3 ... give text",
    ),
    "rules null": ("schema: flexquant.policy/v1\nrules:\n", "2: rules is null ... at least one rule"),
    "rules empty": ("schema: flexquant.policy/v1\nrules: []\n", "2: rules is [] ... at least one rule"),
    "rule not a mapping": (rules("- w8a8"), '3: rules[0] is "w8a8" ... use, when'),
    "rule without use": (rules("- when: {phase: decode}", "- use: w8a8"), "3: rules[0] lacks ... 'use'"),
    "unknown rule key": (
        rules("- when: {phase: decode}", "  uses: w4a16", "- use: w8a8"),
        "4: rules[0].uses is an unknown key ... use, when",
    ),
    "last rule has when": (
        rules("- when: {phase: decode}", "  use: w8a8"),
        "3: rules[0].when is in the last rule ... remove it",
    ),
    "early rule without when": (
        rules("- use: w8a8", "- use: w4a16"),
        "3: rules[0] has no 'when' ... move the rule to the end",
    ),
    "when null": (rules("- when:", "  use: w8a8", "- use: w8a8"), "3: rules[0].when is null ... phase,"),
    "unknown when key": (
        rules("- when:", "    phase: decode", "    batchsize: {max: 4}", "  use: w8a8", "- use: w8a8"),
        "5: rules[0].when.batchsize is an unknown key ... phase, batch_size, tokens",
    ),
    "unknown bound": (
        rules("- when: {tokens: {", "    maximum: 4}}", "  use: w8a8", "- use: w8a8"),
        "4: rules[0].when.tokens.maximum is an unknown key ... min, max",
    ),
    "unknown use key": (
        rules("- use:", "    default: w8a8", "    layer: {}"),
        "5: rules[0].use.layer is an unknown key ... default, layers",
    ),
    "layers unreadable": (
        rules("- use:", "    default: w8a8", "    layers:", "      first: w4a16"),
        '6: rules[0].use.layers.first does not name layers ... "-4--1"',
    ),
    "layers of more digits than Python reads": (
        rules(f"- use: {{default: w8a8, layers: {{? {'9' * 5000} : w4a16}}}}"),
        "3: a key has 5000 characters ... at most 200",
    ),
    "layers given twice": (
        rules("- use:", "    default: w8a8", "    layers:", "      5: w4a16", '      "5": w8a8'),
        "7: rules[0].use.layers.5 was given in line 6 already ... remove one",
    ),
    "duplicate key": (
        rules("- use: w8a8", "  use: w4a16"),
        "4: rules[0].use was given in line 3 already ... remove one",
    ),
    "key a list": (rules("- [use]: w8a8"), "3: a key is a list ... write text"),
    "shadowed": (
        rules(
            "- {when: {phase: decode, batch_size: {max: 8}}, use: w4a16}",
            "- {when: {phase: decode}, use: w8a8}",
            "- {when: {phase: decode, batch_size: {min: 4}}, use: w4a16}",
            "- use: w8a8",
        ),
        "5: rules[2] can never match ... remove or move",
    ),
    "shadowed by two together": (
        rules(
            "- {when: {tokens: {max: 8}}, use: w4a16}",
            "- {when: {tokens: {min: 9, max: 20}}, use: w8a8}",
            "- {when: {phase: mixed, tokens: {max: 20}}, use: w4a16}",
            "- use: w8a8",
        ),
        "5: rules[2] can never match ... remove or move",
    ),
    "batch size above tokens": (
        rules("- {when: {phase: decode, tokens: {max: 8}, batch_size: {min: 9}}, use: w4a16}", "- use: w8a8"),
        "3: rules[0].when can never match ... correct tokens or batch_size",
    ),
    "empty file": ("", "1: the policy is empty ... 'schema' and 'rules'"),
    "comments only": ("# nothing\n", "1: the policy is empty ... 'schema' and 'rules'"),
    "syntax": (rules("- use: {default: w8a8"), "4: not valid YAML ... correct the syntax"),
    "tab": ("schema: x\nrules:\n\t- use: w8a8\n", "3: not valid YAML ... correct the syntax"),
    "two documents": (rules("- use: w8a8") + "---\nb: 1\n", "4: not valid YAML ... correct the syntax"),
}
"""Name of a case -> the policy, and what its message tells: line, problem and advice, with gaps."""


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_bad_file_is_refused(tmp_path, text, told):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(FlexQuantError) as error:
        load_policy(str(path))
    line, _, parts = told.partition(": ")
    (problem, advice), message = parts.split(" ... "), str(error.value)
    assert message.startswith(f"{path}, line {line}: ") and problem in message
    assert advice in message.partition(problem)[2] and "\n" not in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"schema: \xff\xfe\n", "not valid YAML"),
        (b"schema: a\x00b\n", "not valid YAML"),
        (b"rules: &a [*a]\n", "an alias that contains itself"),
    ],
    ids=["not utf-8", "control character", "alias to itself"],
)
def test_unreadable_yaml_is_refused(tmp_path, text, problem):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(FlexQuantError) as error:
        load_policy(str(path))
    assert str(error.value).startswith(f"{path}: ") and problem in str(error.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"rules": []}, "model's policy: the policy lacks the key 'schema'"),
        (
            {"schema": "flexquant.policy/v1", "rules": [{"use": True}]},
            "model's policy: rules[0].use is true; give the name of a variant",
        ),
        ({1: 2}, "model's policy: 1 is an unknown key"),
    ],
)
def test_bad_document_is_refused_without_a_line(document, message):
    with pytest.raises(FlexQuantError) as error:
        parse_policy(document, source="model's policy")
    assert str(error.value).startswith(message)


def test_characters_that_json_writes_as_two_escapes_are_one():
    description = "fast \U0001f680, caf\u00e9"
    document = {"schema": "flexquant.policy/v1", "description": description, "rules": [{"use": "w8a8"}]}
    policy = parse_policy_text(json.dumps(document).encode(), "posted", "posted")
    assert policy.description == policy.document["description"] == description


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('"description": "a \\ud83d"', "line 2: description is 'a \\ud83d', which cannot be read (half of a"),
        ('"description": "\\ude00\\ud83d"', "which cannot be read (half of a character"),
        ('"\\ud83d": 1', "line 2: a key cannot be read (half of a character"),
        (f'"measured": {2**63}', f"line 2: measured is '{2**63}', which cannot be read (a number of more"),
        (f'"measured": -{"9" * 300}', "which cannot be read (a number of more than 63 bit)"),
        (f'"measured": {"59:" * 20}59', "which cannot be read (a number of more than 63 bit)"),
        ('"measured": !!binary aGk=', "(JSON has no such value)"),
    ],
)
def test_what_no_other_process_could_be_told_is_refused(entry, problem):
    text = f'{{"schema": "flexquant.policy/v1", "rules": [{{"use": "w8a8"}}],\n{entry}}}'
    with pytest.raises(FlexQuantError, match=re.escape(problem)) as error:
        parse_policy_text(text.encode(), "posted", "posted")
    assert str(error.value).encode()


@pytest.mark.parametrize("key", ["9" * 5000, "x" * 201])
def test_a_key_of_a_stored_policy_that_is_too_long_is_refused(key):
    use = {"default": "w8a8", "layers": {key: "w8a8"}}
    with pytest.raises(FlexQuantError, match=f"stored policy: a key has {len(key)} characters.*at most 200"):
        parse_policy({"schema": "flexquant.policy/v1", "rules": [{"use": use}]}, "stored policy")


def test_a_few_lines_that_aliases_make_endless_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "bomb.yaml").write_text("\n".join([rules("- use: w8a8"), *lines]))
    with pytest.raises(FlexQuantError, match="holds more than 100000 values, aliases written out"):
        load_policy(str(tmp_path / "bomb.yaml"))


def test_a_policy_of_very_many_rules_is_refused():
    entries = [{"when": {"tokens": {"max": i}}, "use": "w8a8"} for i in range(1, 64)]
    document = {"schema": "flexquant.policy/v1", "rules": [*entries, {"use": "w4a16"}]}
    assert len(parse_policy(document, "stored policy").rules) == 64
    rules = [{"when": {"tokens": {"max": 64}}, "use": "a"}, *entries, {"use": "a"}]
    with pytest.raises(FlexQuantError, match="has 65 rules; write at most 64"):
        parse_policy(document | {"rules": rules}, "stored policy")


@pytest.mark.parametrize("path", ["missing.yaml", "missing.yml", "sub/missing", "~no-such-user/missing"])
def test_missing_file_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlexQuantError, match=rf"^{path}: .*No such file.*w8a8, w8a8-from-int4$"):
        load_policy(path)


def test_unknown_name_lists_the_builtin_ones_and_a_folder_is_refused(tmp_path):
    with pytest.raises(FlexQuantError, match=f"'fast': .* {', '.join(builtin_policies())};"):
        load_policy("fast")
    with pytest.raises(FlexQuantError, match="Is a directory"):
        load_policy(str(tmp_path))


def test_file_without_suffix_is_found_unless_a_builtin_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "w8a8"):
        Path(name).write_text(rules("- use: fp8"))
    assert load_policy("mine").variants == ("fp8",) and load_policy("w8a8").variants == ("w8a8",)
    assert load_policy("./w8a8").variants == ("fp8",)


def test_a_path_may_begin_at_the_users_home(tmp_path, monkeypatch):
    """In a server's options no shell expands it."""
    (tmp_path / "mine").write_bytes(DATES)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_named("~/mine", "flexquant.policies", "policy") == (DATES, "~/mine")
