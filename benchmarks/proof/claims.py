# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The claims of FlexQuant, by question, and a verdict on each from what has been measured so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.proof.outcomes import FAILED, NOT_RUN, PASSED, SKIPPED, Outcomes
from benchmarks.speed.comparing import Measured, Metric, compare_beside, paired_ratios, second_server
from benchmarks.speed.results import Cell
from benchmarks.speed.subjects import FLEXQUANT
from benchmarks.speed.tables import METRICS, by_workload, decode_ms, kernel_results, prefill_ms
from benchmarks.speed.workloads import Workload
from flexquant.evaluation.comparison import FEWEST_ROUNDS, Comparison, compare

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
CLOSE = 1.03
"""A ratio up to this counts as equal: a claim of equality cannot be shown nearer than servers differ."""
ROUTED, ONE_COPY = f"{FLEXQUANT}phase-batch", f"{FLEXQUANT}one-copy"
ENOUGH = 30
"""Fewest pairs of single requests that tell of a first token."""
MANY_TOKENS = 2048
"""Tokens from which on INT8 computed from one copy is to be faster than W4A16."""

FIRST_TOKEN = "What does FlexQuant add before a first token?"
LIVE = "What does a policy by phase win at the shape of a large model?"
COPY = "Is INT8 from one copy faster than W4A16's kernel?"
TESTS = "Do the tests of tests/gpu pass?"
SERVERS = "What do servers side by side show?"
QUESTIONS = (FIRST_TOKEN, LIVE, COPY, TESTS, SERVERS)

TESTED = {
    "test_graph_modes.py": "a constant policy answers as the static checkpoint does, in every graph mode",
    "test_plans_in_graphs.py": "every CUDA graph holds the policy's plan, and all are there before serving",
    "test_one_copy.py": "INT8 weights are computed from what Marlin keeps, and answers with them",
    "test_w4a8_marlin.py": "W4A8 is what vLLM's Marlin computes with 8-bit activations",
    "test_tune.py": "`flexquant tune` finds a policy for this machine",
}
"""File name of tests/gpu -> the claim that its tests show."""
RUNNERS = ("V2", "V1")


class Verdict(NamedTuple):
    """A claim with what was found."""

    claim: str
    verdict: str
    """SHOWN, NOT_SHOWN or CONTRADICTED."""
    evidence: str


class Found(NamedTuple):
    """Everything that a proof has found so far; every part may be empty."""

    outcomes: Outcomes
    cells: Sequence[Cell]
    first_tokens: Mapping[str, Any]
    """Runner -> prompt -> what benchmarks.proof.first_token wrote."""
    live: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]
    """Workload -> policy -> the result of every round, as `benchmarks policies` wrote them."""
    rival: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]] = {}
    """The same of a second server of the same shape, whose W4A16 has the kernel that stock vLLM takes."""
    large: Sequence[Cell] = ()
    """Cells of kernels at the shape of a large model."""


def judge(found: Found) -> dict[str, list[Verdict]]:
    """Return the verdicts on all claims, by question."""
    live, rival = _measured(found.live), _measured(found.rival)
    serving = by_workload(found.cells, "serving")
    return {
        FIRST_TOKEN: list(_first_tokens(found.first_tokens)),
        LIVE: [*_by_phase(live, "phase-batch"), *_beside_vllms_choice(live, rival)],
        COPY: [_kernel(found.cells, "the model's shape"), _kernel(found.large, "a large model's shape")],
        TESTS: list(_tested(found.outcomes)),
        SERVERS: [*_by_phase(serving, ROUTED), _one_copy(serving)],
    }


def _measured(live: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]) -> Measured:
    return {
        Workload.parse(name): {policy: dict(enumerate(rounds)) for policy, rounds in policies.items()}
        for name, policies in live.items()
    }


def _tested(outcomes: Outcomes) -> Iterator[Verdict]:
    for runner in RUNNERS:
        of_runner = {t: o for t, o in outcomes.items() if re.search(rf"[\[-]{runner}\b", t)}
        yield _by_tests(f"all tests pass on vLLM's {runner} runner", "tests/gpu", of_runner)
    for file, claim in TESTED.items():
        of_file = {t: o for t, o in outcomes.items() if f"/{file}::" in t}
        yield _by_tests(claim, f"tests/gpu/{file}", of_file)


def _by_tests(claim: str, where: str, outcomes: Outcomes) -> Verdict:
    count = Counter(outcome["outcome"] for outcome in outcomes.values())
    said = ", ".join(f"{count[outcome]} {outcome}" for outcome in (PASSED, FAILED, SKIPPED) if count[outcome])
    verdict = NOT_SHOWN
    if count[FAILED]:
        verdict = CONTRADICTED
    elif count[PASSED] and not count[NOT_RUN]:
        verdict = SHOWN
    rest = f"; {count[NOT_RUN]} without an outcome" if count[NOT_RUN] else ""
    return Verdict(claim, verdict, f"{where}: {said or 'not run'}{rest}")


def _first_tokens(by_runner: Mapping[str, Any]) -> Iterator[Verdict]:
    """Yield what FlexQuant adds to vLLM's own call of the same plan, with each of vLLM's runners."""
    for runner in RUNNERS:
        for what, name in (("first", "first token"), ("later", "time per token")):
            found, said, enough = [], [], True
            for prompt, run in by_runner.get(runner, {}).items():
                own, base = run["modes"]["all"][what]["beyond_vllm"], run["modes"]["vllm"][what]["median_ms"]
                found.append([1 + own[end] / base for end in ("low", "high")])
                said.append(
                    f"{prompt}: {own['ms']:+.3f} ms ({own['low']:+.3f} – {own['high']:+.3f}) on {base:.2f} ms"
                )
                enough &= run["rounds"] >= ENOUGH
            verdict = NOT_SHOWN
            if found and enough:
                shown, contradicted = all(e[1] <= CLOSE for e in found), any(e[0] > CLOSE for e in found)
                verdict = CONTRADICTED if contradicted else SHOWN if shown else NOT_SHOWN
            claim = f"one variant costs nothing over vLLM's own call of it, {runner} runner: {name}"
            yield Verdict(claim, verdict, "; ".join(said) or "not measured")


def _kernel(cells: Sequence[Cell], where: str) -> Verdict:
    """Return the verdict on a decoder layer's linears together, beside W4A16 by its fastest kernel.

    Quartiles tell whether they differ.
    """
    parts: dict[int, dict[str, dict[str, tuple[float, ...]]]] = {}
    for (layer, *_), by_tokens in kernel_results(cells).items():
        for tokens, schemes in by_tokens.items():
            for scheme, found in schemes.items():
                if tokens >= MANY_TOKENS and "microseconds" in found:
                    ends = (found["microseconds"], *found["microseconds_quartiles"])
                    parts.setdefault(tokens, {}).setdefault(scheme, {})[layer] = ends
    said, sooner, later = [], [], []
    for tokens, by_scheme in sorted(parts.items()):
        copied = by_scheme.pop("one-copy", {})
        rivals = {
            scheme: [sum(ends) for ends in zip(*linears.values(), strict=True)]
            for scheme, linears in by_scheme.items()
            if scheme.partition("@")[0] == "w4a16" and linears.keys() == copied.keys()
        }
        if rivals:
            rival = min(rivals, key=rivals.__getitem__)
            middle, low, high = (sum(ends) for ends in zip(*copied.values(), strict=True))
            other, least, most = rivals[rival]
            said.append(f"{tokens} tokens: {middle:.0f} µs against {other:.0f} µs (`{rival}`)")
            sooner.append(high < least)
            later.append(low > most)
    verdict = CONTRADICTED if any(later) else SHOWN if said and all(sooner) else NOT_SHOWN
    claim = (
        f"from {MANY_TOKENS} tokens on, INT8 from one copy multiplies a layer sooner than W4A16, at {where}"
    )
    return Verdict(claim, verdict, "; ".join(said) or "not measured")


def _by_phase(measured: Measured, routed: str) -> Iterator[Verdict]:
    """Yield what a policy by phase, named ``routed``, is to do beside each variant alone."""
    batches = {w: s for w, s in measured.items() if w.rate is None}
    one = {w: s for w, s in batches.items() if w.most_at_once == 1}
    several = {w: s for w, s in batches.items() if w.most_at_once > 1}
    per_token, rate = (METRICS[name][0] for name in ("TPOT ms", "tokens/s"))
    decode = _compare(one, [(routed, "w8a8")], per_token)
    yield _sooner("one sequence is decoded sooner than under static W8A8", decode)
    decode = _compare(one, [(routed, "w4a16")], per_token)
    yield _no_slower("one sequence is decoded at the pace of static W4A16", decode)
    ratios = _compare(several, [(routed, "w8a8")], prefill_ms)
    yield _no_slower("a batch has its first tokens when it has them under static W8A8", ratios)
    ratios = _compare(several, [(routed, "w8a8")], decode_ms)
    yield _sooner("a batch is decoded sooner than under static W8A8", ratios)
    for static in ("w8a8", "w4a16"):
        ratios = _compare(several, [(routed, static)], rate)
        yield _faster(f"a batch makes more tokens a second than under static {static.upper()}", ratios)


def _beside_vllms_choice(live: Measured, rival: Measured) -> Iterator[Verdict]:
    """Yield verdicts on policies beside the W4A16 of a second server; W8A8, which both have, relates them."""
    per_token, rate = (METRICS[name][0] for name in ("TPOT ms", "tokens/s"))

    def compared(policy: str, metric: Metric, at_once: bool) -> Ratios:
        found = []
        for workload, own in live.items():
            if workload not in rival or policy not in own or (workload.most_at_once > 1) != at_once:
                continue
            ours = paired_ratios(own[policy], own["w8a8"], metric)
            theirs = paired_ratios(rival[workload]["w4a16"], rival[workload]["w8a8"], metric)
            if both := [a / b for a, b in zip(ours, theirs, strict=False)]:
                found.append((f"{workload.name}, `{policy}` / vLLM's `w4a16`", compare(both)))
        return found

    vllms = "W4A16 by the kernel that stock vLLM takes"
    yield _no_slower(
        f"one sequence is decoded at the pace of {vllms}", compared("phase-batch", per_token, False)
    )
    yield _faster(f"a batch makes more tokens a second than {vllms}", compared("phase-batch", rate, True))
    claim = f"INT8 from one copy of INT4 weights prefills a batch sooner than {vllms}"
    yield _sooner(claim, compared("one-copy", prefill_ms, True))


def _one_copy(serving: Measured) -> Verdict:
    several = {w: s for w, s in serving.items() if w.rate is None and w.most_at_once > 1}
    ratios = _compare(several, [(ONE_COPY, "w4a16")], prefill_ms)
    return _sooner("INT8 from one copy of INT4 weights prefills a batch sooner than static W4A16", ratios)


Ratios = list[tuple[str, Comparison]]


def _compare(measured: Measured, wanted: Iterable[tuple[str, str]], metric: Metric) -> Ratios:
    """Return the ratios of pairs; a second server of the static one makes their intervals wider."""
    return [
        (
            f"{workload.name}, `{subject}` / `{static}`",
            compare_beside(ratios, second_server(subjects, static, metric)),
        )
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
