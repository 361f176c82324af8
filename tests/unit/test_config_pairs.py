# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Configs of which vLLM makes one model have no differences, others do; what vLLM reads is written down."""

from __future__ import annotations

import json

import pytest

from flexquant.merge.same_model import READ_KEYS, model_differences
from tests.config_pairs import Pair, pairs
from tests.read_keys import table

PAIRS = list(pairs())


@pytest.mark.parametrize("pair", PAIRS, ids=[pair.name for pair in PAIRS])
def test_configs_differ_where_vllm_makes_another_model_of_them(pair: Pair) -> None:
    assert (model_differences(pair.a, pair.b) == []) == pair.alike
    assert (model_differences(pair.b, pair.a) == []) == pair.alike


def test_the_table_has_what_the_installed_vllm_reads() -> None:
    assert json.loads(READ_KEYS.read_text()) == table()
