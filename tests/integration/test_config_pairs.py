# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM makes of two configs decides whether they are one model's; the tests in `unit` rely on it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from flexquant.merge.same_model import keys_read
from tests.config_pairs import Pair, pairs
from tests.vllm_view import view

pytestmark = pytest.mark.full
NEEDS_TORCHVISION = ("gemma3", "mistral3", "qwen2_5_vl")


def cases() -> list[object]:
    missing = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class imports torchvision")
    return [
        pytest.param(pair, id=pair.name, marks=missing if pair.name.split()[0] in NEEDS_TORCHVISION else ())
        for pair in pairs()
    ]


@pytest.mark.parametrize("pair", cases())
def test_vllm_makes_the_same_model_of_both_or_not(pair: Pair, tmp_path: Path) -> None:
    first, second = (view(tmp_path, config) for config in (pair.a, pair.b))
    assert (first.model == second.model) == pair.alike
    read = keys_read(pair.a)
    assert read is not None and len(first.keys) > 10
    assert {key for key in first.keys | second.keys if not key.startswith("_")} <= read.keys()
