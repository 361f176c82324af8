# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The JSON Schema of policies accepts what FlexQuant accepts, and editors find it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

import flexquant.policies
from flexquant import cli
from flexquant.documents.yaml_document import from_yaml
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import parse_policy
from flexquant.policy.schema import json_schema
from tests.unit.test_policy_refusals import BAD

FOLDER = Path(flexquant.policies.__file__).parent
FILE = FOLDER / "policy.schema.json"
TUNED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "tuning").glob("*.yaml"))
OF_MEANING = (
    "last rule has when",
    "early rule without when",
    "batch size",
    "min above max",
    "layers backwards",
    "shadowed",
)
"""How the names of those refusals begin that JSON Schema cannot express."""


def test_it_accepts_every_policy_that_is_shipped_or_was_tuned():
    schema = json_schema()
    policies = [*sorted(FOLDER.glob("*.yaml")), *TUNED]
    assert len(policies) > 10
    for path in policies:
        document = from_yaml(path.read_bytes(), path.name, "policy", ("schema", "rules")).data
        jsonschema.validate(document, schema)


@pytest.mark.parametrize("text", [case[0] for case in BAD.values()], ids=BAD)
def test_it_refuses_what_is_refused_but_for_meaning(text, request):
    try:
        document = from_yaml(text.encode(), "bad.yaml", "policy", ("schema", "rules")).data
    except FlexQuantError:
        return
    with pytest.raises(FlexQuantError):
        parse_policy(document)
    accepted = jsonschema.Draft202012Validator(json_schema()).is_valid(document)
    assert accepted == request.node.callspec.id.startswith(OF_MEANING)


def test_the_file_is_of_the_models(capsys):
    """If not: flexquant policy schema > policies/policy.schema.json"""
    assert cli.main(["policy", "schema"]) == 0
    assert FILE.read_text(encoding="utf-8") == capsys.readouterr().out
    assert json.loads(FILE.read_text(encoding="utf-8")) == json_schema()


def test_built_in_policies_name_it_for_editors():
    for path in FOLDER.glob("*.yaml"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first == "# yaml-language-server: $schema=policy.schema.json", path.name
        assert yaml.safe_load(path.read_bytes())["schema"] == "flexquant.policy/v1"
