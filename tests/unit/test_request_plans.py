# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which plans served the requests that a response answers, found by the response's id alone."""

from __future__ import annotations

import pytest

from flexquant.serving.worker.request_plans import KEPT, RequestPlans

COMPLETION, CHAT, RESPONSE = "cmpl-97de04d2af853d53", "chatcmpl-a1643df193f2ed39", "resp_bd0a3713"


@pytest.mark.parametrize(
    ("response", "request_name"),
    [
        (COMPLETION, f"{COMPLETION}-0-93f2ed39"),
        (COMPLETION, f"{COMPLETION}-17-a1643df1"),
        (COMPLETION, f"3_{COMPLETION}-0-bd0a3713"),
        (COMPLETION, f"{COMPLETION}-945801adeba23b4b-beam-1-875983fc"),
        (COMPLETION, f"{COMPLETION}-0"),
        (CHAT, f"{CHAT}-93f2ed39"),
        (CHAT, f"1_{CHAT}-93f2ed39"),
        (CHAT, f"{CHAT}_2-93f2ed39"),
        (CHAT, CHAT),
        (RESPONSE, f"{RESPONSE}_0-93f2ed39"),
        ("cmpl-a.*(b", "cmpl-a.*(b-0-93f2ed39"),
    ],
)
def test_a_response_finds_its_requests(response: str, request_name: str) -> None:
    plans = RequestPlans()
    plans.record({request_name: 20}, "w8a8")
    plans.record({request_name: 1, "cmpl-another-0-93f2ed39": 1}, "w4a16")
    plans.record({request_name: 1}, "w4a16")
    runs = [{"plan": "w8a8", "tokens": 20}, {"plan": "w4a16", "tokens": 2}]
    assert plans.find(response) == [{"request": request_name, "plans": runs}]


def test_runs_of_one_plan_are_told_by_their_moments_where_there_are_any() -> None:
    plans = RequestPlans()
    for plan, moment in [("w8a8", ""), *[("w8a8", "since_prompt 1-2")] * 2, ("w4a16", "since_prompt 3+")]:
        plans.record({COMPLETION: 1}, plan, moment)
    (found,) = plans.find(COMPLETION)
    assert found["plans"] == [
        {"plan": "w8a8", "tokens": 1},
        {"plan": "w8a8", "tokens": 2, "moment": "since_prompt 1-2"},
        {"plan": "w4a16", "tokens": 1, "moment": "since_prompt 3+"},
    ]
    assert plans.tokens([COMPLETION]) == {COMPLETION: {"w8a8": 3, "w4a16": 1}}


@pytest.mark.parametrize(
    "response", ["", "c", "cmpl", "cmpl-", "cmpl-97de", "0_", "3_cmpl", "cmpl-.*", f"{COMPLETION}-0-0"]
)
def test_what_is_no_responses_id_finds_nothing(response: str) -> None:
    plans = RequestPlans()
    plans.record({f"{COMPLETION}-0-93f2ed39": 20, f"3_{COMPLETION}-0-bd0a3713": 20}, "w8a8")
    assert plans.find(response) == []


def test_the_response_whose_id_begins_like_another_is_not_taken_for_it() -> None:
    plans = RequestPlans()
    plans.record({"cmpl-mine-0-89fbf9ed": 20, "cmpl-mine-0-0-957b8590": 30}, "w8a8")
    assert [found["request"] for found in plans.find("cmpl-mine")] == ["cmpl-mine-0-89fbf9ed"]


def test_the_last_requests_are_kept() -> None:
    plans = RequestPlans()
    for number in range(KEPT + 1):
        plans.record({f"cmpl-{number}-0-93f2ed39": 1}, "w8a8")
    assert plans.find("cmpl-0") == []
    assert plans.find("cmpl-1") and plans.find(f"cmpl-{KEPT}")


def test_requests_under_way_are_kept_however_many_they_are() -> None:
    plans = RequestPlans()
    requests = {f"cmpl-{number}-0-93f2ed39": 1 for number in range(KEPT + 100)}
    under_way = {**requests}
    plans.under_way = lambda: under_way
    for number in range(10):
        plans.record(requests if number else dict.fromkeys(requests, 8), "w8a8")
    for number in (0, KEPT + 99):
        (found,) = plans.find(f"cmpl-{number}")
        assert found["plans"] == [{"plan": "w8a8", "tokens": 17}] and "incomplete" not in found
    for request in [*under_way][1:102]:
        del under_way[request]
    plans.record({"cmpl-last-0-93f2ed39": 1}, "w8a8")
    assert plans.find("cmpl-0") and plans.find("cmpl-last"), "of those that have ended, the first ones go"
    assert [number for number in range(120) if not plans.find(f"cmpl-{number}")] == [*range(1, 102)]


def test_a_request_that_goes_on_after_it_was_forgotten_is_marked() -> None:
    plans = RequestPlans()
    late, whole = f"1_{COMPLETION}-0-93f2ed39", f"0_{COMPLETION}-0-93f2ed39"
    plans.record({late: 20}, "w8a8")
    plans.record({f"cmpl-{number}-0-93f2ed39": 1 for number in range(KEPT)}, "w8a8")
    assert plans.find(COMPLETION) == []
    plans.record({late: 1, whole: 1}, "w4a16")
    runs = [{"plan": "w4a16", "tokens": 1}]
    assert plans.find(COMPLETION) == [
        {"request": late, "plans": runs, "incomplete": True},
        {"request": whole, "plans": runs},
    ]
    assert plans.tokens([f"{COMPLETION}-0", whole]) == {whole: {"w4a16": 1}}
    # Names are forgotten too, in the end.
    plans.record({f"cmpl-{number}-0-bd0a3713": 1 for number in range(2 * KEPT)}, "w8a8")
    plans.record({late: 20}, "w8a8")
    assert plans.find(COMPLETION) == [{"request": late, "plans": [{"plan": "w8a8", "tokens": 20}]}]


def test_the_tokens_of_an_engines_request_are_those_of_all_its_answers() -> None:
    plans = RequestPlans()
    plans.record({f"{COMPLETION}-0-93f2ed39": 20, f"0_{CHAT}-bd0a3713": 30, f"1_{CHAT}-bd0a3713": 30}, "w8a8")
    plans.record({f"{COMPLETION}-0-93f2ed39": 1, f"1_{CHAT}-bd0a3713": 1, COMPLETION: 3}, "w4a16")
    plans.record({f"{COMPLETION}-0-93f2ed39": 1}, "w8a8")
    found = plans.tokens([f"{COMPLETION}-0", CHAT, COMPLETION, "cmpl"])
    assert found == {
        f"{COMPLETION}-0": {"w8a8": 21, "w4a16": 1},
        CHAT: {"w8a8": 60, "w4a16": 1},
        COMPLETION: {"w4a16": 3},
    }
