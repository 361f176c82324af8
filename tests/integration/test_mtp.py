# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Drafts by the model's own heads (MTP), read from a merged checkpoint: those of stock vLLM, plan by plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.platforms import current_platform

from flexquant.merge import merge_checkpoints
from tests.integration.conftest import Answers, answers, engine, every_plan_of, take_policy
from tests.integration.logprobs import assert_equal_but_for_ties
from tests.integration.test_serving_errors import configure, refusal
from tests.mtp import KINDS, make_mtp_pair
from tests.policies import LAYERED_DECODE

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="compares tokens of passes of unlike sizes"),
]

PROMPTS = ["hello world, this is a prompt " * 2, "abc abc abc", "xyz 1"]
SAMPLING = {"max_tokens": 6, "ignore_eos": True}
DRAFTED = {"method": "mtp", "num_speculative_tokens": 1}
POLICIES = {"w8a8": "w8a8", "w4a16": "w4a16", "changing": LAYERED_DECODE}
FIRST = 3
"""Steps whose drafts are compared: later ones follow tokens that may differ by a tie."""
Drafts = list[list[list[int]]]


@contextmanager
def drafting(folder: Path, policy: str | None = None, **options: Any) -> Iterator[tuple[LLM, Drafts]]:
    """Yield an engine, and by step what it drafts for each prompt."""
    with engine(folder, policy, speculative_config=DRAFTED, max_model_len=256, **options) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        drafts: Drafts = []
        take = scheduler.update_draft_token_ids

        def taken(found: Any) -> None:
            drafts.append(found.draft_token_ids)
            take(found)

        scheduler.update_draft_token_ids = taken
        yield llm, drafts


def answers_by_policy(llm: LLM, drafts: Drafts | None = None) -> dict[str, tuple[Answers, Drafts]]:
    found = {}
    for name, policy in POLICIES.items():
        take_policy(llm, policy)
        before = len(drafts or ())
        given = answers(llm, PROMPTS, **SAMPLING)
        found[name] = given, (drafts or [])[before:]
    return found


@pytest.mark.parametrize(
    ("kind", "heads", "quantised"),
    [
        ("MiMo", ("w8a8",), ("w8a8",)),
        *(
            pytest.param(kind, ("w8a8", "w4a16"), quantised, marks=pytest.mark.full)
            for kind in KINDS
            # Stock vLLM looks for the names that MiMo and Ernie give their heads under others in `ignore`.
            for quantised in ([("w8a8", "w4a16")] if kind in ("MiMo", "Ernie") else [(), ("w4a16",)])
        ),
    ],
)
def test_drafts_are_those_of_stock_and_are_verified_under_each_plan(
    kind: str, heads: tuple[str, ...], quantised: tuple[str, ...], tmp_path: Path
) -> None:
    pair = make_mtp_pair(tmp_path, kind, heads=heads, quantised=quantised)
    merge_checkpoints(pair, tmp_path / "merged")
    union = every_plan_of([*POLICIES.values()])
    with engine(tmp_path / "merged", union, max_model_len=256) as llm:
        without = answers_by_policy(llm)
    with drafting(tmp_path / "merged", union) as (llm, drafts):
        found = answers_by_policy(llm, drafts)
    for policy, (given, drafted) in found.items():
        assert_equal_but_for_ties(given, without[policy][0], wholly=0.3)
        assert drafted and all(ids for ids in drafted[0]), "every prompt has a draft after its prefill"
    first = heads[0]  # with heads in both, the first source's are read
    with drafting(pair[first]) as (llm, of_stock):
        stock = answers(llm, PROMPTS, **SAMPLING)
    assert_equal_but_for_ties(found[first][0], stock)
    assert found[first][1][:FIRST] == of_stock[:FIRST]


def test_a_published_checkpoint_drafts_with_its_heads(tmp_path: Path) -> None:
    """It is served as it is, in one copy; of another checkpoint's heads the merged one makes use too."""
    pair = make_mtp_pair(tmp_path, "MiMo", heads=("w4a16",), quantised=("w4a16",))
    with drafting(pair["w4a16"], "w4a16", config_format="flexquant") as (llm, drafts):
        found = answers(llm, PROMPTS, **SAMPLING)
    with drafting(pair["w4a16"]) as (llm, of_stock):
        assert_equal_but_for_ties(found, answers(llm, PROMPTS, **SAMPLING))
    assert drafts[:FIRST] == of_stock[:FIRST]


def test_without_heads_mtp_is_refused_with_a_way_out(tmp_path: Path) -> None:
    for kind in ("DeepSeek", "GLM"):  # whose drafts vLLM knows by the model's type and by its architecture
        pair = make_mtp_pair(tmp_path / kind, kind, heads=())
        merge_checkpoints(pair, merged := tmp_path / kind / "merged")
        assert "merge a variant that has them" in refusal(merged, speculative_config=DRAFTED)
        published = {**DRAFTED, "model": str(make_mtp_pair(tmp_path / kind / "other", kind)["w8a8"])}
        assert configure(merged, speculative_config=published).speculative_config.method == "mtp"
