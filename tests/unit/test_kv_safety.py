# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The reasons why a module may not hand its scales on: the cache that variants share, or the model itself."""

from __future__ import annotations

import pytest

from flexquant.quantization import vocabulary
from flexquant.quantization.vocabulary import SHARED_CACHE, check_mapping, check_targets

CHANGE_THE_STATE = [
    "in_proj_qkvz",
    "in_proj_qkv",
    "in_proj_ba",
    "in_proj_a",
    "in_proj_b",
    "in_proj",
    "x_proj",
    "dt_proj",
    "conv1d",
    "conv",
]
CHANGE_THE_CACHE = ["v_proj", "k_proj", "q_proj", "qkv_proj", "k_norm", "q_norm", *CHANGE_THE_STATE]
CHANGE_THE_MODEL = ["o_proj", "gate_proj", "down_proj", "out_proj", "in_proj_z"]


@pytest.mark.parametrize("name", CHANGE_THE_CACHE + CHANGE_THE_MODEL)
def test_the_reason_names_the_shared_cache_only_where_k_or_v_change(name):
    reason = check_mapping([r"re:.*self_attn\.o_proj$"], rf"re:.*\.{name}$")
    assert reason is not None and name in reason
    assert (SHARED_CACHE in reason) == (name in CHANGE_THE_CACHE)


def test_every_refused_module_is_covered_here():
    refused = {name.rpartition(".")[2] for name in (*vocabulary._CACHED, *vocabulary._UNBALANCED)}
    assert refused == {*CHANGE_THE_CACHE, *CHANGE_THE_MODEL}


@pytest.mark.parametrize("target", ["Conv1d", r"re:.*linear_attn\.conv1d$", "model.layers.3.conv.conv"])
def test_convolutions_that_write_a_state_are_no_targets(target):
    assert SHARED_CACHE in (check_targets(["Linear", target]) or "")
    assert check_targets(["Linear", r"re:.*linear_attn\.in_proj_qkvz$"]) is None
