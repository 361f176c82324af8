# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The final norm and the lm_head have to make the same logits in all variants, whatever is folded."""

from __future__ import annotations

import pytest
import torch

from flexquant.merge.kv.compatibility import KVReport, check_kv_compatibility
from tests.checkpoints import StateDict, fold_final_norm, make_pair
from tests.unit.edits import Edit, edit_tensor, in_float32, rotate_residual
from tests.unit.full_merge import opened

HEAD, NORM = "lm_head.weight", "model.norm.weight"


def compared(tmp_path, edit: Edit, architecture: str = "llama", **overrides) -> KVReport:
    return check_kv_compatibility(opened(make_pair(tmp_path, architecture, in_float32(edit), **overrides)))


def folded(state: StateDict) -> None:
    state.update(fold_final_norm(state))


def folded_into_one_plus_weight(state: StateDict) -> None:
    state[HEAD] = state[HEAD] * (1 + state[NORM])
    state[NORM] = torch.zeros_like(state[NORM])


def rotated_but_for_the_head(state: StateDict) -> None:
    head, norm = state[HEAD].clone(), state[NORM].clone()
    rotate_residual(state)
    state |= {HEAD: head, NORM: norm}


@pytest.mark.parametrize(
    ("architecture", "edit"), [("llama", folded), ("gemma3", folded_into_one_plus_weight)]
)
def test_a_norm_that_is_folded_into_the_head_changes_nothing(tmp_path, architecture, edit):
    found = compared(tmp_path, edit, architecture, tie_word_embeddings=False)
    assert found.layered_plans, found.message


def test_a_rotation_that_takes_the_head_along_changes_nothing(tmp_path):
    assert compared(tmp_path, rotate_residual).compatible


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (edit_tensor("^lm_head", torch.randn_like), "lm_head"),
        (edit_tensor("^lm_head", lambda w: torch.cat([w[:-1], w[-1:] * 1.3])), "gain error of row 319"),
        (edit_tensor("^lm_head", lambda w: w[torch.randperm(len(w))]), "lm_head"),
        (edit_tensor(r"^model\.norm", lambda w: 2 * w), "lm_head, with the norm before it"),
        (edit_tensor(r"^model\.norm", lambda w: w * (0.8 + 0.4 * torch.rand_like(w))), "the norm before it"),
        (rotated_but_for_the_head, "norm, behind the layers, computes something else"),
    ],
    ids=["another head", "one token", "tokens in another order", "norm doubled", "norm changed", "rotated"],
)
def test_other_logits_are_those_of_another_model(tmp_path, edit, named):
    message = compared(tmp_path, edit).message
    assert named in message and "not copies of one model" in message


def test_a_bias_of_the_last_norm_has_to_be_equal(tmp_path):
    """The factors of the norm's outputs hide what is added in one column."""
    edit = edit_tensor(r"^model\.norm\.bias", lambda b: torch.cat([b[:1] + 0.3, b[1:]]))
    message = compared(tmp_path, edit, "stablelm").message
    assert "norm, behind the layers, computes something else" in message


def test_a_bias_of_the_last_norm_may_be_rounded_to_another_dtype(tmp_path):
    edit = edit_tensor(r"^model\.norm\.bias", lambda b: b * (1 + 2.0**-8))
    assert compared(tmp_path, edit, "stablelm").compatible


@pytest.mark.parametrize("edited", ["norm", "embedding"])
def test_a_tied_model_is_compared_by_its_embedding(tmp_path, edited):
    edit = edit_tensor(r"^model\.norm", lambda w: 2 * w) if edited == "norm" else (lambda state: None)
    found = compared(tmp_path, edit, tie_word_embeddings=True)
    assert found.compatible is (edited == "embedding")
    assert ("model.embed_tokens, with the norm before it" in found.message) is (edited == "norm")
