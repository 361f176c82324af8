# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From a server's traffic, written by hand, and measured times to a proposal and what it would save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from flexquant.errors import FlexQuantError, UsageError
from flexquant.policy.default_policy import find_policies
from flexquant.policy.pass_times import PassTimes, Time
from flexquant.policy.plans import Plan
from flexquant.policy.rules import parse_policy
from flexquant.serving.frontend.metrics import SECONDS, SIZE
from flexquant.tuning.objectives import Goal, Slo
from flexquant.tuning.retuning import Retuning
from flexquant.tuning.traffic import Cell, Traffic, watch

VARIANTS = ("w8a8", "w4a16")
SIZES = (1, 2, 4, 8, 16, 32)


def constant(seconds: float) -> dict[int, Time]:
    return {size: Time(seconds, seconds, seconds) for size in SIZES}


def growing(seconds: float) -> dict[int, Time]:
    return {size: Time(seconds * size, seconds * size, seconds * size) for size in SIZES}


# Measured in decode, W4A16 is faster up to 8 sequences; in prefill it never is.
TIMES = PassTimes(
    decode={"w8a8": constant(0.010), "w4a16": growing(0.001)},
    prefill={"w8a8": growing(0.001), "w4a16": growing(0.002)},
    context=16,
    context_seconds=0.0,
    origin={"date": "2026-11-21"},
)


def retuning(cells: list[Cell], seconds: dict[tuple[str, str], float], layers: int = 4) -> Retuning:
    traffic = Traffic(cells, seconds, "phase", VARIANTS)
    return Retuning(traffic, TIMES, find_policies(VARIANTS, VARIANTS), layers)


def test_times_are_scaled_to_the_live_ones_by_variant_and_phase() -> None:
    found = retuning(
        [Cell("w4a16", "decode", 4, 100), Cell("w4a16", "decode", 8, 50), Cell("w8a8", "prefill", 32, 10)],
        # The measured times would be 0.8 s and 0.32 s.
        {("w4a16", "decode"): 1.6, ("w8a8", "prefill"): 0.32},
    )
    ratios = found.ratios()
    assert ratios["w4a16", "decode"] == pytest.approx(2)
    assert ratios["w8a8", "prefill"] == pytest.approx(1)
    # A variant that did not run in a phase is taken to be off by as much as the one that did.
    assert ratios["w8a8", "decode"] == pytest.approx(2)
    assert ratios["w4a16", "prefill"] == pytest.approx(1)
    scaled = found.scaled()
    assert scaled.decode["w4a16"][4].median == pytest.approx(0.008)
    assert scaled.prefill["w8a8"][4].median == pytest.approx(0.004)


def test_a_mixed_pass_counts_with_prefill() -> None:
    cells = [Cell("w8a8", "prefill", 16, 10), Cell("w8a8", "mixed", 16, 10)]
    found = retuning(cells, {("w8a8", "prefill"): 0.16, ("w8a8", "mixed"): 0.48})
    assert found.ratios()["w8a8", "prefill"] == pytest.approx(2)


def test_a_layered_plans_seconds_are_divided_among_its_variants() -> None:
    plan = Plan.from_layers(("w8a8", "w4a16", "w4a16", "w4a16")).name
    # One pass of 4 sequences takes 0.0025 s in W8A8, 0.003 s in W4A16.
    found = retuning([Cell(plan, "decode", 4, 10)], {(plan, "decode"): 0.11})
    assert found.ratios()["w8a8", "decode"] == pytest.approx(2)
    assert found.ratios()["w4a16", "decode"] == pytest.approx(2)


def test_what_a_proposal_saves_is_told_of_the_passes_that_were_watched() -> None:
    cells = [Cell("w4a16", "decode", 32, 100), Cell("w4a16", "decode", 4, 100)]
    found = retuning(cells, {("w4a16", "decode"): 3.6})
    tuned = found.propose(Goal("latency"), "http://host")
    assert tuned.decision.variant("decode", 4) == "w4a16" and tuned.decision.variant("decode", 32) == "w8a8"
    # As served, 100 passes take 32 ms and 4 ms; as proposed, 10 ms and 4 ms.
    assert found.gain(tuned.decision, tuned.times)["decode"] == pytest.approx((3.6, 1.4))
    notes = "\n".join(tuned.notes)
    assert "It would save 61 % of the time in passes; nothing has been applied." in notes
    assert "200 passes under phase" in notes
    policy = parse_policy(tuned.document)
    assert policy.measured is not None and "passes of http://host" in policy.measured.origin["scaled_to"]


def test_a_live_time_that_differs_moves_the_crossover() -> None:
    cells = [Cell("w4a16", "decode", 4, 100), Cell("w8a8", "decode", 32, 100)]
    as_measured = retuning(cells, {("w4a16", "decode"): 0.4, ("w8a8", "decode"): 1.0})
    slower = retuning(cells, {("w4a16", "decode"): 0.8, ("w8a8", "decode"): 1.0})
    ends = [r.propose(Goal("latency"), "u").decision.ranges["decode"][0].last for r in (as_measured, slower)]
    assert ends[0] in (8, 9, 10) and ends[1] in (4, 5)


def test_a_policy_that_is_best_already_is_left() -> None:
    found = retuning([Cell("w4a16", "decode", 2, 500)], {("w4a16", "decode"): 1.0})
    assert "not worth a change" in found.propose(Goal("latency"), "u").notes[-1]


def test_bounds_hold_for_the_scaled_times() -> None:
    found = retuning([Cell("w4a16", "decode", 1, 100)], {("w4a16", "decode"): 0.3})
    with pytest.raises(FlexQuantError, match=r"tpot=2ms cannot be met.*takes 3 ms"):
        found.propose(Goal("balanced", Slo(tpot=0.002)), "u")


def test_variants_without_measured_times_are_refused() -> None:
    with pytest.raises(FlexQuantError, match="no measured times of w4a8, only of w8a8, w4a16"):
        retuning([Cell("w4a8", "decode", 1, 100)], {("w4a8", "decode"): 1.0})


@pytest.mark.parametrize("plan", ["w8a8+w4a16[3-9]", "w8a8+w4a16", "w8a8+[0]", "w4a16[0]", "w8a8+w4a16[2-1]"])
def test_a_plan_of_another_model_is_refused(plan: str) -> None:
    with pytest.raises(FlexQuantError, match="is no plan of a model with 4 layers|is not a variant name"):
        Plan.from_name(plan, 4)


@pytest.mark.parametrize("layers", ["aaaa", "abaa", "aabb", "bbab", "abca", "cbba"])
def test_a_plan_is_found_by_its_name(layers: str) -> None:
    plan = Plan.from_layers(tuple(layers))
    assert Plan.from_name(plan.name, len(layers)) == plan


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc/passwd", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no URL of a server"):
        watch(url, 0)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(FlexQuantError, match="cannot read http://127.0.0.1:9/metrics"):
        watch("http://127.0.0.1:9", 0)


def test_the_cost_of_context_grows_with_the_live_times() -> None:
    found = retuning([Cell("w4a16", "decode", 4, 100)], {("w4a16", "decode"): 1.2})
    found = replace(found, times=replace(TIMES, context_seconds=1e-6))
    assert found.scaled().context_seconds == pytest.approx(3e-6)


def test_a_mixed_pass_would_take_the_variant_for_prefill() -> None:
    found = retuning([Cell("w4a16", "mixed", 4, 100)], {("w4a16", "mixed"): 0.8})
    tuned = found.propose(Goal("latency"), "u")
    assert (tuned.decision.variant("decode", 4), tuned.decision.variant("prefill", 4)) == ("w4a16", "w8a8")
    assert found.gain(tuned.decision, tuned.times)["mixed"] == pytest.approx((0.8, 0.4))


def test_a_variant_that_the_server_has_not_loaded_needs_a_restart() -> None:
    traffic = Traffic([Cell("w4a16", "decode", 32, 100)], {("w4a16", "decode"): 3.2}, "w4a16", ["w4a16"])
    found = Retuning(traffic, TIMES, find_policies(VARIANTS, VARIANTS), 4)
    assert (
        "has not loaded w8a8: it would have to be restarted" in found.propose(Goal("latency"), "u").notes[-1]
    )


@contextmanager
def server_of(*pages: str) -> Iterator[str]:
    """Yield the URL of a server whose /metrics shows the next of the pages each time that it is read."""
    left = [*pages]

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(left.pop(0).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def metrics(passes: int, seconds: float, plan: str = "w4a16") -> str:
    labels = f'plan="{plan}",phase="decode"'
    return f"""# TYPE {SIZE} histogram
{SIZE}_bucket{{le="4",{labels}}} {passes}
{SIZE}_bucket{{le="+Inf",{labels}}} {passes}
{SIZE}_count{{{labels}}} {passes}
# TYPE {SECONDS} counter
{SECONDS}_total{{{labels}}} {seconds}
"""


def test_traffic_is_what_was_counted_meanwhile() -> None:
    with server_of(metrics(100, 2.0), metrics(350, 4.5)) as url:
        traffic = watch(url, 0.01)
    assert traffic.passes == 250 and traffic.seconds == {("w4a16", "decode"): 2.5}


@pytest.mark.parametrize(
    "after",
    [metrics(350, 0.5), metrics(99, 2.5), metrics(400, 9.0, plan="w8a8")],
    ids=["less time", "fewer passes", "a plan that is gone"],
)
def test_a_server_that_was_started_again_meanwhile_is_refused(after: str) -> None:
    with (
        server_of(metrics(100, 2.0), after) as url,
        pytest.raises(FlexQuantError, match=f"{url} was started again while .*watch it again"),
    ):
        watch(url, 0.01)
