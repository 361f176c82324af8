# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The statistics of an evaluation, by hand: divergences, their errors, and how far answers agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flexquant.evaluation import measure
from flexquant.evaluation.measure import Scores, kl_divergence, standard_error, summarise_scores


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
