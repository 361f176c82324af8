# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in the search for layered plans, in what it rests on, and in evaluations of plans."""

from __future__ import annotations

from tests.faults.fault import Fault

SEARCH = "tests/unit/test_searching.py::"
EVALUATION = "tests/unit/test_evaluation.py::"

SEARCHING = (
    Fault(
        "neighbours-not-measured",
        "Of the chain of plans only the one where the halving ends is measured.",
        "flexquant/layers/searching.py",
        "return chain[max(0, first - 1) : first + 2]",
        "return chain[first : first + 1]",
        (SEARCH + "test_plans_beside_the_one_that_keeps_to_the_loss_are_measured_too",),
    ),
    Fault(
        "slowdown-from-the-slowest",
        "A slowdown is counted from the slowest variant instead of the fastest.",
        "flexquant/layers/searching.py",
        "fastest = min(self._seconds(all_in",
        "fastest = max(self._seconds(all_in",
        (SEARCH + "test_a_slowdown_is_one_above_the_fastest_variant",),
    ),
    Fault(
        "compared-with-more-layers",
        "A plan is compared with one that raises a layer more than it does.",
        "flexquant/layers/searching.py",
        "range(number - count // 2, number)",
        "range(number - count // 2 - 1, number)",
        (SEARCH + "test_what_the_chosen_plan_is_compared_with_raises_as_many_layers",),
    ),
    Fault(
        "prompts-by-the-searched-plan",
        "Where a tuned policy loses too much, its prompts too take the plan that was searched for decode.",
        "flexquant/layers/limiting.py",
        "if decodes else study.highest",
        "if decodes else Plan.from_layers(plan.layers).rule_use()",
        (SEARCH + "test_prompts_keep_the_most_precise_variant_where_a_tuned_policy_loses_too_much",),
    ),
    Fault(
        "slower-plan-on-the-front",
        "A plan that is slower than another and no better counts among the best.",
        "flexquant/layers/budget.py",
        "plan.kl < found[-1].kl",
        "plan.kl <= found[-1].kl",
        (SEARCH + "test_of_two_plans_as_good_the_slower_one_is_not_on_the_front",),
    ),
    Fault(
        "results-of-another-checkpoint",
        "Results of another checkpoint in a folder of the same name are gone on with.",
        "flexquant/layers/sensitivity.py",
        "f.name: f.stat().st_size for f",
        "f.name: 0 for f",
        (SEARCH + "test_results_of_another_study_are_not_gone_on_with",),
    ),
    Fault(
        "results-of-another-study",
        "Results with other settings are gone on with.",
        "flexquant/layers/sensitivity.py",
        "if different or not isinstance(measured, dict):",
        "if not isinstance(measured, dict):",
        (SEARCH + "test_results_of_another_study_are_not_gone_on_with",),
    ),
    Fault(
        "questions-cut-into-chunks",
        "A batch of questions may have more tokens than a pass of the engine that answers them.",
        "flexquant/evaluation/measure.py",
        "most = max(batch_size * prompt_tokens, batch_tokens or 0)",
        "most = batch_size * prompt_tokens",
        (EVALUATION + "test_a_pass_holds_the_longest_prompts_of_a_batch",),
    ),
    Fault(
        "derived-variant-for-nothing",
        "A derived variant beside its source counts as no memory.",
        "flexquant/evaluation/weight_bytes.py",
        "(key, name if name in routes.derived else None)",
        "(key, None)",
        (EVALUATION + "test_a_derived_variant_is_held_beside_its_source",),
    ),
)
