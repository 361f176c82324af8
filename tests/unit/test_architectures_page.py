# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The page of architectures and the README say what the committed results do."""

from __future__ import annotations

import json
import re

from tests.architectures.outcomes import FAILS, NOT_MADE, PAGE, RESULTS, ROOT, SERVED, page


def test_page_is_what_the_results_say():
    """If it fails, run python -m tests.architectures, which tries the architectures that are missing."""
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8")))


def test_all_were_tried_and_every_end_but_served_has_a_reason():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    found = results["architectures"].values()
    assert len(found) == results["text_models"]
    assert not [one["architecture"] for one in found if one["outcome"] == FAILS]
    assert not [one["architecture"] for one in found if one["outcome"] != SERVED and not one["reason"]]


def test_readme_has_the_numbers_of_the_results():
    outcomes = [one["outcome"] for one in json.loads(RESULTS.read_text())["architectures"].values()]
    said = re.search(r"(\d+) of the (\d+) that can be made small", (ROOT / "README.md").read_text())
    assert said is not None
    assert [int(number) for number in said.groups()] == [
        outcomes.count(SERVED),
        len(outcomes) - outcomes.count(NOT_MADE),
    ]
