# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From samples to a policy: intervals, ties, crossovers, objectives, bounds, and the file."""

import random
from contextlib import nullcontext
from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError, UsageError
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import find_policies, load_policy, parse_policy
from flexquant.tuning import policy_file
from flexquant.tuning.candidates import FROM_INT4, Memory
from flexquant.tuning.objectives import Goal, decide, parse_slo
from flexquant.tuning.policy_file import TuningFiles, kernel_notes, origin_notes, tuned_policy_document
from flexquant.tuning.samples import Samples, check_decidable, undecided

SIZES = (1, 2, 4, 8, 16, 32, 64)
VARIANTS = ["w8a8", "w4a16"]
ALL = 10**6


def measured(curves, rounds=6, noise=0.005, sizes=SIZES, seed=0) -> Samples:
    """Return samples of passes that take ``curves[variant](size)`` seconds, scattered by ``noise``."""
    rng = random.Random(seed)
    samples = Samples()
    for phase in ("decode", "prefill"):
        for size in sizes:
            for _ in range(rounds):
                drift = rng.uniform(1, 1.5)  # the machine drifts from round to round, for all variants alike
                for variant, curve in curves.items():
                    samples.add(variant, phase, size, curve(size) * drift * (1 + rng.uniform(-noise, noise)))
    return samples


def crossing_at(size: float) -> dict:
    """Return curves by which W4A16 is twice as fast at first, and slower from ``size`` on."""
    return {"w8a8": lambda n: 10 + 0.1 * n, "w4a16": lambda n: 5 + (5 / size + 0.1) * n}


def decided(samples, objective="latency", variants=VARIANTS, together=None, slo=""):
    goal = Goal(objective, parse_slo(slo) if slo else {})
    return decide(samples, variants, goal, lambda names: ALL, together)


def by_hand(**rounds) -> Samples:
    """Return samples of passes of size 8 that take so many seconds, round by round."""
    samples = Samples()
    for phase in ("decode", "prefill"):
        for variant, times in rounds.items():
            for seconds in times:
                samples.add(variant, phase, 8, seconds)
    return samples


def test_drift_that_the_variants_share_hides_no_difference():
    samples = measured({"w8a8": lambda n: n, "w4a16": lambda n: 0.95 * n})
    assert samples.time("w8a8", "decode", 8).low < 0.95 * samples.time("w8a8", "decode", 8).high
    assert decided(samples).variants == ("w4a16",)


@pytest.mark.parametrize(
    ("w4a16", "noise", "objective", "chosen"),
    [
        # One odd size makes no range of its own.
        (lambda n: 0.97 if n == 8 else 1.5, 0.005, "latency", ["w8a8"]),
        # A tie goes to the more precise.
        (lambda n: 0.99 if n > 4 else 0.5, 0.005, "latency", ["w4a16", "w8a8"]),
        # A balanced policy loads only what gains.
        (lambda n: 0.96 if n < 8 else 1.2, 0.001, "latency", ["w4a16", "w8a8"]),
        (lambda n: 0.96 if n < 8 else 1.2, 0.001, "balanced", ["w8a8"]),
    ],
)
def test_the_choice_beside_w8a8_that_takes_a_second(w4a16, noise, objective, chosen):
    samples = measured({"w8a8": lambda n: 1.0, "w4a16": w4a16}, noise=noise)
    ranges = decided(samples, objective).ranges["decode"]
    assert [found.variant for found in ranges] == chosen
    assert len(chosen) == 1 or 4 <= ranges[0].last < 8


@pytest.mark.parametrize("crossover", [3, 5.5, 9, 11, 15, 24, 40])
def test_thresholds_lie_at_the_crossover(crossover):
    first, second = decided(measured(crossing_at(crossover))).ranges["decode"]
    assert (first.variant, second.variant) == ("w4a16", "w8a8")
    low, high = first.between
    assert low <= first.last < high and first.last == pytest.approx(crossover, rel=0.2, abs=1)


def test_tuned_twice_thresholds_agree():
    runs = [decided(measured(crossing_at(11), noise=0.03, seed=seed)) for seed in range(20)]
    ends = [run.ranges["decode"][0].last for run in runs]
    assert min(ends) >= 8 and max(ends) <= 16


@pytest.mark.parametrize(("ratio", "chosen"), [(1.04, "w8a8"), (1.06, "w4a16")])
def test_noise_makes_no_tie_of_a_difference_of_more_than_5_percent(ratio, chosen):
    """The intervals overlap: the estimate decides whether W8A8 is taken for its precision."""
    samples = by_hand(w8a8=(0.99, ratio - 0.01, ratio, ratio + 0.01, ratio + 0.02), w4a16=(1.0,) * 5)
    found = samples.compare("w8a8", "w4a16", "decode", 8)
    assert found.low < 1 and found.ratio == pytest.approx(ratio, abs=1e-3)
    assert decided(samples).variants == (chosen,)


def test_a_noisy_machine_is_told_and_not_decided():
    samples = measured({"w8a8": lambda n: 1.0, "w4a16": lambda n: 1.01}, noise=0.2)
    open_sizes = {phase: undecided(samples, VARIANTS, phase) for phase in ("decode", "prefill")}
    count = sum(map(len, open_sizes.values()))
    assert 0 < count < 14
    with pytest.raises(FlexQuantError, match=f"too noisy to decide: at {count} of 14 sizes"):
        check_decidable(samples, VARIANTS)
    for phase, sizes in open_sizes.items():
        for size in SIZES:
            rounds = 0 if size in sizes else 6
            assert [samples.count(v, phase, size) for v in VARIANTS] == [rounds, rounds]


def test_notes_of_kernels_rounds_what_is_not_loaded_and_throughput_beyond_what_was_measured():
    named, warning = kernel_notes({"w8a8": ["ExactCPUInt8LinearKernel"], "w4a16": ["CPUW4A16LinearKernel"]})
    assert named == "Kernels: w8a8 ExactCPUInt8LinearKernel; w4a16 CPUW4A16LinearKernel."
    assert warning.startswith("w8a8 runs on ExactCPUInt8LinearKernel, which multiplies W8A8 in fp32")
    assert kernel_notes({}) == []
    origin = {"machine": {"gpu": "H"}, "versions": {}, "command": "", "date": "", "rounds": 2}
    assert origin_notes(origin, Goal())[-1] == "Fewer than 5 rounds: too few to compare the variants."
    assert origin_notes({**origin, "rounds": 5}, Goal())[-1].startswith("Medians of 5 rounds or more")
    (note,) = policy_file.unused_notes({"w4a16": 2_000_000})
    assert note.startswith("w4a16 is never chosen and so not loaded, which leaves 1.9 MiB")
    samples = measured(crossing_at(11))
    (note,) = policy_file.batch_notes(samples, Goal("throughput", request_tokens=100), requests=lambda: 65)
    assert "that of 64 sequences" in note and "65 requests of 100 tokens fit" in note
    assert policy_file.batch_notes(samples, Goal("throughput"), requests=lambda: 64) == []
    assert policy_file.batch_notes(samples, Goal("latency"), requests=lambda: 65) == []


@pytest.mark.parametrize(("count", "is_told"), [(2, False), (3, True)])
def test_a_third_of_the_sizes_may_be_undecided(count, is_told):
    samples = measured(crossing_at(11), sizes=(1, 64))
    for size in range(2, 2 + count):
        for variant, seconds in (("w8a8", 1.0), ("w4a16", 3.0)):
            samples.add(variant, "prefill", size, seconds)
            samples.add(variant, "prefill", size, 2.0)
    with pytest.raises(FlexQuantError, match="at 3 of 7 sizes") if is_told else nullcontext():
        check_decidable(samples, VARIANTS)


def test_few_undecided_sizes_are_noted_and_a_crossover_with_the_sizes_that_noise_leaves_open():
    samples = measured(crossing_at(11))
    for variant, seconds in (("w8a8", 1.0), ("w4a16", 3.0)):
        samples.add(variant, "prefill", 128, seconds)
        samples.add(variant, "prefill", 128, 2.0)
    check_decidable(samples, VARIANTS)
    assert not undecided(samples, VARIANTS, "decode") and [*undecided(samples, VARIANTS, "prefill")] == [128]
    notes = policy_file.crossover_notes(samples, VARIANTS, decided(samples))
    # Ratios of 3 and 1: of two rounds the interval is both.
    assert "prefill: undecided at these tokens: 128 (up to 200 % apart)." in notes
    curves = {"w8a8": lambda n: 1.0, "w4a16": lambda n: 0.7 if n < 8 else 1.0 if n < 32 else 1.3}
    samples = measured(curves, noise=0.02)
    (note, _) = policy_file.crossover_notes(samples, VARIANTS, decided(samples))
    said = "takes over between the measured 4 and 8; equal within 3.3 % at 8, equal within 2.2 % at 16)"
    assert said in note


def test_throughput_counts_the_batch_that_fits():
    """Both variants, equally fast, leave room for 30 requests, W8A8 alone for 50, W4A16 alone for 70."""
    samples = measured(crossing_at(11))

    def choose(room):
        return decide(samples, VARIANTS, Goal("throughput"), lambda variants: room[len(variants)])

    assert choose({1: 64, 2: 64}).variants == ("w8a8",)
    equal = measured({"w8a8": lambda n: 1.0, "w4a16": lambda n: 1.0})
    memory = Memory(total=1000, shared=100, own={"w8a8": {"w8a8": 400}, "w4a16": {"w4a16": 200}})
    for request, chosen in ((10, "w4a16"), (1, "w8a8"), (500 / 64, "w8a8")):
        decision = decide(equal, VARIANTS, Goal("throughput"), lambda v, r=request: memory.requests(v, r))
        assert decision.variants == (chosen,)
    with pytest.raises(FlexQuantError, match="no variant leaves room in memory for one request"):
        choose({1: 0, 2: 0})


@pytest.mark.parametrize(("w4a16", "chosen"), [(0.985, "w8a8"), (0.975, "w4a16")])
def test_for_throughput_the_more_precise_may_be_slower_by_2_percent(w4a16, chosen):
    samples = measured({"w8a8": lambda n: 1.0, "w4a16": lambda n: w4a16}, noise=0)
    assert decided(samples, "throughput").variants == (chosen,)


def test_of_sets_that_fit_the_first_is_taken_unless_another_is_faster():
    curves = {"w8a8": lambda n: 1.0, "w4a16": lambda n: 1.01, "w4a8": lambda n: 0.5}
    samples = measured(curves, noise=0.001)
    for together, chosen in (
        ([["w8a8"], ["w4a16"]], "w8a8"),
        ([["w4a16"], ["w8a8"]], "w4a16"),
        ([["w8a8"], ["w4a16", "w4a8"]], "w4a8"),
    ):
        assert decided(samples, variants=list(curves), together=together).variants == (chosen,)


def test_a_measured_plan_is_written_with_its_layers_and_without_its_times():
    names = ["w8a8", "w4a16", FROM_INT4]
    policies = find_policies(names, VARIANTS)
    use = {"default": FROM_INT4, "layers": {"0": "w8a8"}}
    document = policies[FROM_INT4].document | {"rules": [{"use": use}]}
    candidates = policies | {"mixed": parse_policy(document, "stored policy")}
    curves = {"mixed": 1, "w8a8": 3, FROM_INT4: 2}
    samples = measured({n: lambda _, s=s: s for n, s in curves.items()} | {"w4a16": lambda n: n / 16})
    decision = decided(samples, variants=[*names, "mixed"])
    tuned = tuned_policy_document(decision, candidates, samples.pass_times(16, {}), "latency")
    assert [rule["use"] for rule in tuned["rules"]] == ["w4a16", use, "w4a16", use]
    assert tuned["derive"] == {FROM_INT4: {"from": "w4a16", "activations": "int8", "weights": "int8"}}
    assert set(tuned["measured"]["decode_ms"]) == set(names)


def test_bounds_take_the_most_precise_that_keeps_them():
    samples = measured(crossing_at(100), noise=0)
    drift = 1.25
    slo = f"tpot={11.5e3 * drift:g}ms"
    decision = decided(samples, slo=slo)
    assert decision.variant("decode", 1) == "w8a8" and decision.variant("decode", 32) == "w4a16"
    assert decision.variant("prefill", 1) == "w4a16"  # without a bound the fastest variant is taken
    (note,) = policy_file.bound_notes(samples, decision, parse_slo(slo))
    assert note.startswith(f"{slo} is kept up to")


@pytest.mark.parametrize(("slo", "chosen"), [("tpot=10ms", "w8a8"), ("tpot=5ms", "w4a16")])
def test_a_bound_is_kept_by_a_pass_that_takes_as_long(slo, chosen):
    assert decided(by_hand(w8a8=(0.01,), w4a16=(0.005,)), slo=slo).variant("decode", 8) == chosen


@pytest.mark.parametrize(
    ("slo", "together", "message"),
    [
        ("tpot=1ms", None, r"tpot=1ms cannot be met: .* w4a16; ask for tpot=\d+ms or more"),
        ("tpot=1ms,ttft=2ms", None, r"^ttft=2ms cannot be met: .*tpot=1ms cannot be met: "),
        ("tpot=8ms", [["w8a8"]], "tpot=8ms cannot be met: .* w8a8"),
    ],
)
def test_an_unreachable_bound_names_the_nearest(slo, together, message):
    samples = measured({"w8a8": lambda n: 0.010, "w4a16": lambda n: 0.005}, noise=0)
    with pytest.raises(FlexQuantError, match=message):
        decided(samples, slo=slo, together=together)
    # A set that keeps no bound is left out.
    assert decided(samples, slo="tpot=8ms", together=[["w8a8"], ["w4a16"]]).variants == ("w4a16",)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=3", "ttft=0ms", "tpot=-1ms", "itl=3ms", "ttft=1s,ttft=2s"]
)
def test_bounds_are_read_or_refused(text):
    slo = parse_slo("tpot=0.03s, ttft=300ms")
    assert slo == {"prefill": 0.3, "decode": 0.03} and str(Goal(slo=slo)) == "ttft=300ms,tpot=30ms"
    with pytest.raises(UsageError, match=r"in --slo is not a bound; write ttft=300ms"):
        parse_slo(text)


def test_the_policy_says_what_was_decided_and_one_variant_everywhere_is_one_rule(tmp_path):
    samples = measured(crossing_at(11))
    decision = decided(samples)
    times = samples.pass_times(16, {"model": "m", "date": "2026-11-21"})
    document = tuned_policy_document(decision, find_policies(VARIANTS, VARIANTS), times, "latency")
    tuned = policy_file.TuningResult(document, decision, times, ["Tuned here."])
    (tmp_path / "tuned.yaml").write_text(text := policy_file.policy_text(tuned))
    policy = load_policy(str(tmp_path / "tuned.yaml"))
    table = build_route_table(policy, VARIANTS, num_layers=2, max_tokens=256, max_decode_tokens=64)
    for size in range(1, 65):
        assert table.lookup("decode", size).name == decision.variant("decode", size)
    for size in range(1, 257):
        for phase in ("prefill", "mixed"):
            assert table.lookup(phase, size).name == decision.variant("prefill", size)
    assert policy.measured.decode["w8a8"][8].median == pytest.approx(times.decode["w8a8"][8].median, rel=1e-3)
    assert text.startswith("# Tuned here.\n#\n# decode, ms")
    assert "8 sequences" in text
    samples = measured({"w8a8": lambda n: 1.0, "w4a16": lambda n: 2.0})
    policies = find_policies(VARIANTS, VARIANTS)
    document = tuned_policy_document(decided(samples), policies, samples.pass_times(16, {}), "x")
    assert document["rules"] == [{"use": "w8a8"}]


def test_neither_a_policy_nor_a_plot_is_replaced_unasked(tmp_path):
    for file in (tmp_path / "tuned.yaml", tmp_path / "tuned.png"):
        file.touch()
        with pytest.raises(UsageError, match=f"{file.name} exists"):
            TuningFiles(tmp_path / "tuned.yaml")
        assert TuningFiles(tmp_path / "tuned.yaml", overwrite=True)
        file.unlink()


RECORDED = Path(__file__).parents[2] / "benchmarks/results/tuning"
NAMES = ["0.5b-avx512", "1.5b-avx512", "1.5b-zen4-again", "smollm2-135m-again", "smollm2-135m-avx512"]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_measured_on_real_machines_is_decided_as_it_was_there(name):
    """The policies hold the medians of their runs, which decide as their rounds did."""
    policy = load_policy(str(RECORDED / f"{name}.yaml"))
    samples = Samples()
    for phase, curves in (("decode", policy.measured.decode), ("prefill", policy.measured.prefill)):
        for variant, curve in curves.items():
            for size, time in curve.items():
                samples.add(variant, phase, size, time.median)
    goal, text = policy.description.removeprefix("tuned for ").split(": ", 1)
    assert policy_file.describe_decision(decided(samples, goal, policy.measured.variants)) == text
