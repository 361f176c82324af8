# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The claims of FlexQuant, and a verdict on each from the outcomes of tests and the cells of a speed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.proof.outcomes import FAILED, PASSED, SKIPPED, Outcomes
from benchmarks.speed.comparing import Measured, Metric, paired_ratios, pairs
from benchmarks.speed.results import Cell
from benchmarks.speed.subjects import FLEXQUANT
from benchmarks.speed.tables import METRICS, by_workload, decode_ms, prefill_ms
from flexquant.measuring.comparison import FEWEST_ROUNDS, Comparison, compare

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
CLOSE = 1.03
"""A ratio up to this counts as equal: a claim of equality cannot be shown nearer than servers differ."""
ROUTED, ONE_COPY = f"{FLEXQUANT}phase-batch", f"{FLEXQUANT}one-copy"

TESTED = {
    "test_graph_modes.py": "a constant policy answers as the static checkpoint does, in every graph mode",
    "test_plans_in_graphs.py": "every CUDA graph holds the policy's plan, and all are there before serving",
    "test_one_copy_marlin.py": "INT8 weights are computed from what Marlin keeps, and answers with them",
    "test_w4a8_marlin.py": "W4A8 is what vLLM's Marlin computes with 8-bit activations",
    "test_tune.py": "`flexquant tune` finds a policy for this machine",
}
"""File name of tests/gpu -> the claim that its tests show."""


class Verdict(NamedTuple):
    """A claim with what was found."""

    claim: str
    verdict: str
    """SHOWN, NOT_SHOWN or CONTRADICTED."""
    evidence: str


def judge(outcomes: Outcomes, unfinished: Collection[str], cells: Sequence[Cell]) -> list[Verdict]:
    """Return a verdict for every claim; ``unfinished`` names the tests for which there was no time."""
    return [*_tested(outcomes, unfinished), *_measured(cells)]


def _tested(outcomes: Outcomes, unfinished: Collection[str]) -> Iterator[Verdict]:
    for file, claim in TESTED.items():
        found = Counter(o["outcome"] for test, o in outcomes.items() if f"/{file}::" in test)
        missing = sum(f"/{file}::" in test for test in unfinished)
        said = ", ".join(
            f"{found[outcome]} {outcome}" for outcome in (PASSED, FAILED, SKIPPED) if found[outcome]
        )
        verdict = NOT_SHOWN
        if found[FAILED]:
            verdict = CONTRADICTED
        elif found[PASSED] and not missing:
            verdict = SHOWN
        rest = f"; {missing} without an outcome" if missing else ""
        yield Verdict(claim, verdict, f"tests/gpu/{file}: {said or 'not run'}{rest}")


def _measured(cells: Sequence[Cell]) -> Iterator[Verdict]:
    serving, overhead = by_workload(cells, "serving"), by_workload(cells, "overhead")
    first, per_token, rate = (METRICS[name][0] for name in ("TTFT ms", "TPOT ms", "tokens/s"))
    one = {w: s for w, s in serving.items() if w.rate is None and w.requests == 1}
    several = {w: s for w, s in serving.items() if w.rate is None and w.requests > 1}
    constant = [(s, r) for subjects in overhead.values() for s, r in pairs(list(subjects), constant=True)]
    for name, metric in (("first token", first), ("time per token", per_token)):
        ratios = _compare(overhead, dict.fromkeys(constant), metric)
        yield _no_slower(f"one variant for everything costs nothing over stock vLLM: {name}", ratios)
    ratios = _compare(one, [(ROUTED, "w4a16")], decode_ms)
    yield _no_slower("one sequence is decoded at the pace of static W4A16", ratios)
    ratios = _compare(several, [(ROUTED, "w8a8")], prefill_ms)
    yield _no_slower("a batch has its first tokens when it has them under static W8A8", ratios)
    ratios = _compare(several, [(ONE_COPY, "w4a16")], prefill_ms)
    yield _sooner("INT8 from one copy of INT4 weights prefills a batch sooner than static W4A16", ratios)
    for static in ("w8a8", "w4a16"):
        ratios = _compare(several, [(ROUTED, static)], rate)
        yield _faster(f"a batch makes more tokens a second than under static {static.upper()}", ratios)


Ratios = list[tuple[str, Comparison]]


def _compare(measured: Measured, wanted: Iterable[tuple[str, str]], metric: Metric) -> Ratios:
    return [
        (f"{workload.name}, `{subject}` / `{static}`", compare(ratios))
        for workload, subjects in measured.items()
        for subject, static in wanted
        if subject in subjects and static in subjects
        if (ratios := paired_ratios(subjects[subject], subjects[static], metric))
    ]


def _no_slower(claim: str, found: Ratios) -> Verdict:
    """Return the verdict on ratios of times, which the claim says are 1 at most."""
    comparisons = [c for _, c in found]
    shown, contradicted = all(c.high <= CLOSE for c in comparisons), any(c.low > CLOSE for c in comparisons)
    return _verdict(claim, found, [c.words() for c in comparisons], shown, contradicted)


def _sooner(claim: str, found: Ratios) -> Verdict:
    """Return the verdict on ratios of times, which the claim says are below 1."""
    comparisons = [c for _, c in found]
    shown, contradicted = all(c.high < 1 for c in comparisons), any(c.low > 1 for c in comparisons)
    return _verdict(claim, found, [c.words() for c in comparisons], shown, contradicted)


def _faster(claim: str, found: Ratios) -> Verdict:
    """Return the verdict on ratios of rates, which the claim says are above 1."""
    comparisons = [c for _, c in found]
    shown, contradicted = all(c.low > 1 for c in comparisons), any(c.high < 1 for c in comparisons)
    return _verdict(claim, found, [c.words("slower", "faster") for c in comparisons], shown, contradicted)


def _verdict(claim: str, found: Ratios, words: list[str], shown: bool, contradicted: bool) -> Verdict:
    said = (f"{what}: {comparison}, {text}" for (what, comparison), text in zip(found, words, strict=True))
    evidence = "; ".join(said) or "not measured"
    if any(comparison.rounds < FEWEST_ROUNDS for _, comparison in found) or not found:
        return Verdict(claim, NOT_SHOWN, evidence)
    return Verdict(claim, CONTRADICTED if contradicted else SHOWN if shown else NOT_SHOWN, evidence)
