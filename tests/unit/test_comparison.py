# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The rule for noise by hand and by tables, how often it is right; an evaluation's statistics by hand."""

import argparse
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from flexquant.cli._arguments import add_effort
from flexquant.evaluation import comparison, measure
from flexquant.evaluation.comparison import EQUAL, HIGHER, LOWER, UNKNOWN, WIDTH, Comparison, Effort, compare
from flexquant.evaluation.measure import Scores, kl_divergence, standard_error, summarise_scores


@pytest.mark.parametrize(
    ("rounds", "outside"),
    [(1, 0), (5, 0), (6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (11, 10), (12, 13)]
    + [(15, 25), (20, 52), (30, 137)],
)
def test_as_many_averages_are_left_out_as_the_tables_say(rounds, outside):
    """The tables hold the signed-rank test's critical values, 5 % two-sided; 5 rounds or fewer have none."""
    assert comparison._outside(rounds) == outside


def test_an_interval_by_hand():
    """Seven logarithms have 28 averages of pairs; two of these are left out on either side."""
    found = compare([2.0**n for n in (0, 1, 2, 4, 8, 16, 32)])
    # The averages in order: 0, 0.5, 1, 1, 1.5, 2, 2, 2.5, 3, 4, 4, 4.5, 5, 6, 8, 8, ..., 20, 24, 32.
    assert found == Comparison(*(pytest.approx(2.0**n) for n in (7, 1, 20)), 7)


@pytest.mark.parametrize(
    ("ratios", "low", "high", "verdict", "words"),
    [
        # The interval of five rounds is the smallest and the largest ratio.
        ([1.1, 1.1, 1.01, 1.3, 1.1], 1.01, 1.3, HIGHER, "10 % slower"),
        ([0.5, 0.5, 0.99, 0.5, 0.5], 0.5, 0.99, LOWER, "50 % faster"),
        ([0.9, 1.2, 1.1, 1.1, 1.3], 0.9, 1.3, EQUAL, "equal within 30 %"),
        ([0.98, 1.0, 1.0, 1.0, 1.011], 0.98, 1.011, EQUAL, "equal within 2.0 %"),
        ([0.9999, 1.0, 1.0, 1.0, 1.000321], 0.9999, 1.000321, EQUAL, "equal within 0.04 %"),
        # Among nine rounds one stall decides nothing, nor does one round that is too fast.
        ([1.1] * 8 + [9.0], 1.1, (1.1 * 9) ** 0.5, HIGHER, "10 % slower"),
        ([1.1] * 8 + [0.1], (1.1 * 0.1) ** 0.5, 1.1, EQUAL, "equal within 67 %"),
        ([1.5, 1.5, 1.5, 1.5], 1.5, 1.5, UNKNOWN, "too few rounds"),
        ([1.5], 1.5, 1.5, UNKNOWN, "too few rounds"),
    ],
)
def test_a_difference_needs_an_interval_without_1(ratios, low, high, verdict, words):
    found = compare(ratios)
    assert (found.low, found.high, found.rounds) == (pytest.approx(low), pytest.approx(high), len(ratios))
    assert (found.verdict, found.words()) == (verdict, words)


@pytest.mark.parametrize(("low", "high", "percent"), [(0.9, 1.1, 10), (0.8999, 1.1, 11), (1, 1.0121, 1.3)])
def test_equality_is_never_told_closer_than_it_is(low, high, percent):
    assert Comparison(1.0, low, high, 6).words() == f"equal within {percent} %"


def test_an_interval_is_narrow_by_its_width_alone():
    assert Comparison(2.0, 1.99, 2.04, 6).is_narrow(0.03)
    assert not Comparison(2.0, 1.99, 2.06, 6).is_narrow(0.03)
    assert not Comparison(2.0, 2.0, 2.0, 4).is_narrow(0.03)


Noise = Callable[[random.Random], float]


def normal(rng: random.Random) -> float:
    return rng.gauss(0, 1)


def stalls(rng: random.Random) -> float:
    """Draw noise in which one round in ten is six times as far off."""
    return rng.gauss(0, 6 if rng.random() < 0.1 else 1)


def heavy_tails(rng: random.Random) -> float:
    """Draw noise from Student's distribution of three degrees of freedom."""
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)


def share(count: int, is_so: Callable[[random.Random], bool]) -> float:
    rng = random.Random(1)
    return sum(is_so(rng) for _ in range(count)) / count


@pytest.mark.parametrize("noise", [normal, stalls, heavy_tails])
@pytest.mark.parametrize("rounds", [6, 12])
def test_intervals_hold_the_ratio_19_times_of_20(noise: Noise, rounds: int):
    """0.92 is two standard errors below 0.95."""

    def holds(rng: random.Random) -> bool:
        found = compare([1.2 * math.exp(0.1 * noise(rng)) for _ in range(rounds)])
        return found.low <= 1.2 <= found.high

    assert 0.92 < share(250, holds) < 1


@pytest.mark.parametrize(("noise", "least"), [(normal, 0.75), (stalls, 0.55)])
def test_ten_rounds_tell_a_difference_as_large_as_the_noise(noise: Noise, least: float):
    """The sign test's interval tells it in half of the runs with normal noise."""
    told = share(250, lambda rng: compare([math.exp(0.1 + 0.1 * noise(rng)) for _ in range(10)]).low > 1)
    assert told > least


def stopped(rng: random.Random, scatter: float, enough: Callable[[Comparison], bool]) -> Comparison:
    ratios = [math.exp(scatter * normal(rng)) for _ in range(6)]
    while not enough(found := compare(ratios)) and len(ratios) < 20:
        ratios.append(math.exp(scatter * normal(rng)))
    return found


def test_to_stop_when_narrow_costs_little_and_to_stop_when_1_is_left_out_a_lot():
    def narrow(rng: random.Random) -> bool:
        return stopped(rng, 0.02, lambda found: found.is_narrow(WIDTH)).verdict == EQUAL

    def different(rng: random.Random) -> bool:
        return stopped(rng, 0.02, lambda found: found.verdict != EQUAL).verdict == EQUAL

    assert share(200, narrow) > 0.91 and share(200, different) < 0.88


def effort_of(*arguments: str) -> Effort:
    parser = argparse.ArgumentParser()
    add_effort(parser.add_argument, "x")
    args = parser.parse_args(arguments)
    return Effort(6, 20).changed(args.rounds, args.max_rounds, args.width)


def test_rounds_as_they_are_asked_for():
    assert effort_of() == Effort(6, 20, 0.03) and effort_of("--rounds", "8") == Effort(8, 8, 0.03)
    assert effort_of("--max-rounds", "30") == Effort(6, 30, 0.03)
    assert effort_of("--max-rounds", "4") == Effort(4, 4, 0.03)
    assert effort_of("--rounds", "8", "--max-rounds", "9", "--width", "0.5%") == Effort(8, 9, 0.005)


@pytest.mark.parametrize("text", ["3", "0%", "-1%", "x%", ""])
def test_what_is_no_width_is_refused(capsys, text):
    with pytest.raises(SystemExit):
        effort_of(f"--width={text}")
    assert f"'{text}' is not a percentage above 0 such as 3%" in capsys.readouterr().err


def test_kl_divergence_by_hand():
    reference = torch.tensor([0.5, 0.25, 0.25]).log()
    other = torch.tensor([0.125, 0.125, 0.75]).log()
    expected = 0.5 * math.log(4) + 0.25 * math.log(2) + 0.25 * math.log(1 / 3)
    assert kl_divergence(reference, other).item() == pytest.approx(expected)
    # A token that the reference rules out adds nothing.
    certain, even = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.5, 0.5]).log()
    assert kl_divergence(certain, even).item() == pytest.approx(math.log(2))
    assert kl_divergence(other, other) == kl_divergence(certain, certain) == 0


def test_summary_by_hand():
    reference = Scores(nll=np.array([[1.0, 2.0], [3.0, 2.0]], dtype=np.float32))
    scores = Scores(
        nll=np.array([[1.5, 2.5], [3.0, 2.0]], dtype=np.float32),
        kl=np.array([[0.1, 0.3], [0.0, 0.0]], dtype=np.float32),
        same_top=np.array([[True, False], [True, True]]),
    )
    assert vars(summarise_scores(scores, reference)) == {
        "tokens": 4,
        "rows": 2,
        "log_perplexity": pytest.approx(2.25),
        "perplexity": pytest.approx(math.exp(2.25)),
        "log_perplexity_difference": pytest.approx(0.25),
        # Row means 0.5 and 0: standard deviation 0.5/sqrt(2), over sqrt(2) rows.
        "log_perplexity_difference_error": pytest.approx(0.25),
        "mean_kl": pytest.approx(0.1),
        "mean_kl_error": pytest.approx(0.1),
        "p99_kl": pytest.approx(np.quantile([0.1, 0.3, 0, 0], 0.99)),
        "first_token_kl": pytest.approx(0.05),
        "top1_agreement": 0.75,
    }
    alone = summarise_scores(Scores(nll=np.full((3, 2), math.log(7))))
    assert alone.perplexity == pytest.approx(7)
    assert alone.mean_kl is alone.top1_agreement is alone.log_perplexity_difference is None


def test_a_standard_error_is_over_the_rows():
    """Means of 1.5, 5 and 1 lie -1, 2.5 and -1.5 from theirs, whose squares are 9.5 in all."""
    found = standard_error(np.array([[1.0, 2.0], [3.0, 7.0], [0.0, 2.0]]))
    assert found == pytest.approx(math.sqrt(9.5 / 2 / 3), rel=1e-12)
    assert standard_error(np.array([[1.0, 2.0]])) is None


@pytest.mark.parametrize(
    ("reference", "answers", "identical", "matched"),
    [
        ([[1, 2, 3, 4], [5, 6], [7]], [[1, 2, 9, 4], [5, 6], [8, 7]], 1, (2 / 4 + 1 + 0) / 3),
        ([[1, 2]], [[1, 2, 3]], 0, 1),  # an answer that goes on
    ],
)
def test_answers_by_hand(reference, answers, identical, matched):
    agreement = measure.compare_answers(reference, answers)
    assert (agreement.questions, agreement.identical) == (len(reference), identical)
    assert agreement.matched == pytest.approx(matched)


def test_a_pass_holds_the_longest_prompts_of_a_batch():
    assert measure.most_tokens([[1] * 5, [1], [1] * 4, [1] * 3, [1] * 6], batch_size=2) == 7
    for asked, held in (((2, 8, 64, 100), 100), ((2, 8, 64, 9), 64), ((16, 8, 64), 128)):
        assert measure.engine_options(*asked)["max_num_batched_tokens"] == held
