# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a row forces and scores, step by step, on logits written down by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexquant.evaluation.forced_decoding import ForcedRow

FORCED = [2, 0, 1]
# Probabilities [step, vocabulary] of the reference and of the policy that is compared with it.
REFERENCE = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.125, 0.125, 0.75]])
POLICY = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]])


def run(row: ForcedRow, probabilities: torch.Tensor) -> list[int]:
    """Take the row through its steps, as vLLM does greedily; return the tokens that it leaves."""
    taken: list[int] = []
    for step in probabilities:
        # Logits are log-probabilities but for a constant.
        taken.append(int(row(taken, step.log() + 3).argmax()))
    return taken


def test_each_step_is_scored_before_its_own_token_is_forced(tmp_path):
    reference = ForcedRow(FORCED, str(tmp_path / "reference.npz"), store_in=str(tmp_path / "stored.npy"))
    assert run(reference, REFERENCE) == FORCED
    policy = ForcedRow(FORCED, str(tmp_path / "policy.npz"), compare_with=str(tmp_path / "stored.npy"))
    assert run(policy, POLICY) == FORCED
    assert np.load(tmp_path / "stored.npy") == pytest.approx(REFERENCE.log().numpy(), abs=1e-6)
    assert np.load(tmp_path / "reference.npz")["nll"] == pytest.approx(-np.log([0.25, 0.25, 0.125]), abs=1e-6)
    compared = np.load(tmp_path / "policy.npz")
    assert compared["nll"] == pytest.approx(-np.log([0.5, 0.5, 0.25]), abs=1e-6)
    kl = (REFERENCE * (REFERENCE / POLICY).log()).sum(dim=1)
    assert compared["kl"] == pytest.approx(kl.numpy(), abs=1e-6)
    backwards = (POLICY * (POLICY / REFERENCE).log()).sum(dim=1)
    assert abs(kl - backwards).max() > 0.01, "otherwise the line above would not tell the two apart"
    assert compared["same_top"].tolist() == [False, False, True]
