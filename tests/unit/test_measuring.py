# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How samples come to be: grids of sizes, rounds until they suffice, and what an interrupted run keeps."""

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest

from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.comparison import Effort
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.measure import Measurement, measure_rounds
from flexquant.tuning.samples import CPU, GPU, QUICK_CPU, QUICK_GPU, Samples
from tests.unit.test_tune import VARIANTS, crossing_at, measured


def added(noise: float, samples: Samples, effort: Effort) -> list[int]:
    """Add rounds of two passes, W8A8's scattered by ``noise``; return how many decode and prefill have."""
    rng = random.Random(0)

    def time(name, phase, size):
        return 1 + (rng.uniform(-noise, noise) if name == "w8a8" else 0)

    passes = [("decode", 4), ("prefill", 8)]
    measure_rounds(samples, VARIANTS, passes, effort, time, lambda done, planned: None)
    assert samples.count("w8a8", "decode", 4) == samples.count("w4a16", "decode", 4)
    return [samples.count("w8a8", *one) for one in passes]


def test_rounds_are_added_until_the_intervals_are_narrow_or_the_most_rounds_are_measured():
    assert added(0.001, Samples(), Effort(6, 20)) == [6, 6]
    noisy = Samples()
    # A run that goes on counts the rounds that are there.
    for most, rounds in ((20, 20), (23, 23), (20, 23)):
        assert added(0.3, noisy, Effort(6, most)) == [rounds, rounds]
    samples = Samples()
    assert all(6 < rounds < 40 for rounds in added(0.04, samples, Effort(6, 40)))
    for phase, size in (("decode", 4), ("prefill", 8)):
        assert samples.compare("w8a8", "w4a16", phase, size).is_narrow(0.03)


def test_the_variants_take_turns_at_being_measured_first():
    called, told = [], []

    def time(*measured):
        called.append(measured)
        return 1.0

    measure_rounds(Samples(), VARIANTS, [("prefill", 8)], Effort(2, 2), time, lambda *done: told.append(done))
    assert called == [(name, "prefill", 8) for name in ("w8a8", "w4a16", "w4a16", "w8a8")]
    assert told == [(1, 2), (2, 2)]


def test_samples_survive_a_stop_and_those_of_another_run_are_refused_with_what_differs(tmp_path):
    file, samples = tmp_path / "samples.json", measured(crossing_at(11))
    run = {"model": "a", "variants": ["w8a8"], "versions": {"vllm": "1"}, "context": (16, 256)}
    samples.save(file, run)
    assert Samples.load(file, run).pass_times(16, {}) == samples.pass_times(16, {})
    before = file.read_bytes()
    with pytest.raises(UsageError, match=r"samples.json .* other variants, versions; .*--overwrite"):
        Samples.load(file, run | {"variants": ["w8a8", "w4a16"], "versions": {"vllm": "2"}})
    assert file.read_bytes() == before
    for content in ("{", "[]", '{"run": {"model": "a"}}'):
        file.write_text(content)
        with pytest.raises(UsageError, match=r"samples.json is not what an interrupted run left"):
            Samples.load(file, {"model": "a"})


def test_another_run_does_not_overwrite_what_an_interrupted_one_measured(merged, config, tmp_path):
    file = tmp_path / "samples.json"

    def begin(*names, **options):
        return Measurement(merged, find_variants(config, names), QUICK_CPU.up_to(2, 16), file, **options)

    begin("w8a8", "w4a16")._save()  # as a run does after every size
    kept = file.read_bytes()
    begin("w8a8", "w4a16")
    with pytest.raises(UsageError, match="other variants"):
        begin("w8a8", "w4a16", "w4a8")._save()
    assert file.read_bytes() == kept
    begin("w8a8", "w4a16", "w4a8", overwrite=True)._save()
    assert file.read_bytes() != kept


def test_sizes_that_are_too_noisy_are_measured_anew(merged, config, tmp_path):
    few = replace(QUICK_CPU.up_to(2, 16), effort=Effort(6, 6))
    file = tmp_path / "samples.json"
    measurement = Measurement(merged, find_variants(config, VARIANTS), few, file)
    curves = dict.fromkeys(VARIANTS, lambda n: 1.0)
    measurement.samples = measured(curves, noise=0.6, sizes=(*few.decode, *few.prefill))
    with pytest.raises(FlexQuantError, match="too noisy to decide"):
        measurement.measure(print, lambda *_, **__: nullcontext(lambda done, total: None))
    kept = Samples.load(file, measurement.run)
    assert kept.sizes("decode") == kept.sizes("prefill") == []


@pytest.mark.parametrize("grid", [CPU, GPU, QUICK_CPU, QUICK_GPU])
def test_grids_are_cut_and_extended(grid):
    cut = grid.up_to(max_batch=3, max_tokens=100)
    assert (cut.decode[0], cut.decode[-1]) == (1, 3) and cut.prefill[-1] == 100
    assert grid.fitting(200).prefill[-1] <= 199
    with pytest.raises(UsageError, match="at most 32 tokens"):
        grid.fitting(32)
