# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in evaluating, tuning, predicting and simulating."""

from __future__ import annotations

from tests.faults.fault import Fault

MEASURING = (
    Fault(
        "forced-token-shifted",
        "A step is forced to the token of the step before.",
        "flexquant/evaluation/forced_decoding.py",
        "token = self._forced[position]",
        "token = self._forced[max(position - 1, 0)]",
        ("tests/unit/test_forced_decoding.py",),
    ),
    Fault(
        "kl-arguments-exchanged",
        "Forced decoding takes the policy for the reference.",
        "flexquant/evaluation/forced_decoding.py",
        "kl_divergence(reference, log_probs)",
        "kl_divergence(log_probs, reference)",
        ("tests/unit/test_forced_decoding.py",),
    ),
    Fault(
        "kl-formula-exchanged",
        "KL(policy || reference) is reported as KL(reference || policy).",
        "flexquant/evaluation/scores.py",
        "terms = reference.exp() * (reference - other)",
        "terms = other.exp() * (other - reference)",
        ("tests/unit/test_evaluation.py::test_kl_divergence_by_hand",),
    ),
    Fault(
        "what-costs-time-counts-for-nothing",
        "The layer that wins most is raised first, whatever its time.",
        "flexquant/layers/searching.py",
        "won / longer if longer > 0",
        "won if longer > 0",
        ("tests/unit/test_search.py::test_of_three_variants_a_layer_takes_what_wins_most_for_its_time",),
    ),
    Fault(
        "plan-of-the-wrong-passes",
        "The searched plan decodes as many sequences as there are layers, not as many as were asked for.",
        "flexquant/layers/search_report.py",
        'if rule.matches("decode", sequences, sequences)',
        'if rule.matches("decode", len(found.chosen.layers), 1)',
        ("tests/unit/test_search.py",),
    ),
    Fault(
        "layer-that-costs-least-raised-first",
        "The chain raises first what costs least.",
        "flexquant/layers/searching.py",
        "step: (*worth(*step), -step[0])",
        "step: (worth(*step)[0], -worth(*step)[1], -step[0])",
        ("tests/unit/test_search.py::test_the_chain_raises_the_layer_that_costs_most_first",),
    ),
    Fault(
        "loss-not-limited",
        "A tuned policy keeps a variant that loses more than it may.",
        "flexquant/layers/limiting.py",
        'if losses[rule["use"]] <= most:',
        'if losses[rule["use"]] <= 10 * most:',
        ("tests/integration/test_search.py::test_a_tuned_policy_loses_no_more_than_it_may",),
    ),
    Fault(
        "crossing-inverted",
        "A range ends where the variant that follows is slower.",
        "flexquant/tuning/deciding.py",
        "samples.compare(a, b, phase, size).ratio",
        "samples.compare(b, a, phase, size).ratio",
        ("tests/unit/test_tune.py::test_thresholds_lie_at_the_crossover",),
    ),
    Fault(
        "slowest-chosen",
        "Tuning chooses the slowest variant instead of the fastest.",
        "flexquant/tuning/samples.py",
        "best = min(variants",
        "best = max(variants",
        ("tests/unit/test_tune.py::test_thresholds_lie_at_the_crossover",),
    ),
    Fault(
        "interval-too-narrow",
        "The interval of a ratio has 90 % instead of 95 %.",
        "flexquant/measuring/comparison.py",
        "<= (1 - CONFIDENCE) / 2",
        "<= 1 - CONFIDENCE",
        ("tests/unit/test_comparison.py::test_as_many_averages_are_left_out_as_the_tables_say",),
    ),
    Fault(
        "equality-rounded-down",
        "Two things are called equal within less than the interval says.",
        "flexquant/measuring/comparison.py",
        "percent(self.within, math.ceil)",
        "percent(self.within)",
        ("tests/unit/test_comparison.py::test_equality_is_never_told_closer_than_it_is",),
    ),
    Fault(
        "rounds-added-without-end",
        "A noisy size is measured in more rounds than were asked for.",
        "flexquant/tuning/rounds.py",
        "self._grid.effort.max_rounds + 1):",
        "self._grid.effort.max_rounds + 2):",
        (
            "tests/unit/test_tune.py::test_rounds_are_added_until_the_intervals_are_narrow_or_the_most_rounds_are_measured",
        ),
    ),
)
