# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A mixture of experts in CUDA graphs: its variants are the static checkpoints, its passes the policy's."""

from __future__ import annotations

import pytest

from tests.checkpoints import EXPERTS
from tests.gpu.conftest import ON_GPU, RUNNERS, graph_engine
from tests.gpu.test_graph_modes import BATCHES
from tests.gpu.test_plans_in_graphs import BY_BATCH
from tests.integration.conftest import answers, records_of, tiny_merged  # noqa: F401 - a fixture
from tests.policies import rules

MODES = ["PIECEWISE", "FULL_AND_PIECEWISE"]
pytestmark = [] if ON_GPU else pytest.mark.full


@pytest.fixture(scope="module")
def folder(tiny_merged):  # noqa: F811
    return tiny_merged("qwen3_moe", 2, (EXPERTS,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_plans_of_a_mixture(runner, mode, folder, tmp_path):
    trace = tmp_path / "trace.jsonl"

    def generate(checkpoint, policy=None, **options):
        with graph_engine(checkpoint, runner, mode, policy, **options) as llm:
            return [answers(llm, batch, max_tokens=8, ignore_eos=True) for batch in BATCHES]

    w8a8, w4a16 = (generate(folder / "merged", rules(f"- use: {name}")) for name in ("w8a8", "w4a16"))
    assert w8a8 == generate(folder / "w8a8")
    assert w4a16 == generate(folder / "w4a16")
    by_batch = generate(folder / "merged", BY_BATCH, flexquant={"trace": str(trace)})
    passes = records_of(trace)[1:]
    plans = {(p["phase"], p["sequences"]): p["plan"] for p in passes}
    assert plans[("decode", 1)] == plans[("decode", 3)] == plans[("decode", 20)] == "w4a16"
    assert plans[("prefill", 1)] == "w8a8"
    assert by_batch[0] not in (w8a8[0], w4a16[0])
