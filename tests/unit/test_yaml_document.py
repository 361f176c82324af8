# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What YAML is read as, also beside libraries that change PyYAML."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import yaml

from flexquant.documents.results import digest_of
from flexquant.documents.yaml_document import from_yaml, read_named
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


def test_a_path_may_begin_at_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a server's options no shell expands it."""
    (tmp_path / "mine").write_bytes(DATES)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_named("~/mine", "flexquant.policies", "policy") == (DATES, "~/mine")
