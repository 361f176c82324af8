# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What YAML is read as, also beside libraries that change PyYAML."""

from __future__ import annotations

from importlib import import_module

import pytest
import yaml

from flexquant.documents.yaml_document import from_yaml

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
