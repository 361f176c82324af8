# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Drafts by the model's own heads (MTP), read from a merged checkpoint: those of stock vLLM, plan by plan."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform

from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint
from flexquant.merge.formats import open_source
from flexquant.merge.merge_plan import check_parameters
from flexquant.serving.draft_heads import LOAD_FORMAT
from flexquant.serving.vllm_api import initialize_model, set_default_torch_dtype
from flexquant.serving.worker.weights import mark, unwritten
from tests.integration.conftest import Answers, answers, assert_alike, engine, every_plan_of, take_policy
from tests.integration.test_serving_errors import configure, refusal
from tests.integration.test_vision import WITH_TORCHVISION
from tests.mtp import KINDS, is_of_head, make_mtp_pair
from tests.policies import LAYERED_DECODE
from tests.stock import one_rank

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
BOTH = ("w8a8", "w4a16")
FROM_TARGET = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
"""Ends of the names of weights that a draft shares with the model."""
FIRST = 3
"""Steps whose drafts are compared: later ones follow tokens that may differ by a tie."""
QUANTISED = [(), BOTH, ("w4a16",)]
"""In which variants heads are quantised."""
DAILY = ("MiMo", "DeepSeek", "Qwen3-Next")
"""The head is a module, a layer behind the last, and a module of a model with states."""
OTHERS = [name for name in KINDS if name not in (*DAILY, "Qwen3.5")]
EVERY_KIND = [*DAILY, pytest.param("Qwen3.5", marks=WITH_TORCHVISION)]
EVERY_KIND += [pytest.param(name, marks=pytest.mark.full) for name in OTHERS]
Drafts = list[list[list[int]]]


@contextmanager
def drafting(
    folder: Path, policy: str | None = None, speculative: dict[str, Any] = DRAFTED, **options: Any
) -> Iterator[tuple[LLM, Drafts]]:
    """Yield an engine, and by step what it drafts for each prompt."""
    with engine(folder, policy, speculative_config=speculative, max_model_len=256, **options) as llm:
        scheduler, drafts = llm.llm_engine.engine_core.engine_core.scheduler, []
        take = scheduler.update_draft_token_ids

        def taken(found: Any) -> None:
            drafts.append(found.draft_token_ids)
            take(found)

        scheduler.update_draft_token_ids = taken
        yield llm, drafts
    assert len(drafts) >= FIRST


def answers_by_policy(llm: LLM, drafts: Drafts | None = None) -> dict[str, tuple[Answers, Drafts]]:
    found = {}
    for name, policy in POLICIES.items():
        take_policy(llm, policy)
        before = len(drafts or ())
        found[name] = answers(llm, PROMPTS, **SAMPLING), (drafts or [])[before:]
    return found


def drafting_config(folder: Path) -> VllmConfig:
    arguments = EngineArgs(str(folder), max_model_len=256, enforce_eager=True, speculative_config=DRAFTED)
    return arguments.create_engine_config()


def empty_draft(config: VllmConfig) -> torch.nn.Module:
    """Return the draft of a server, without weights yet."""
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        initialize_model(config)
        return initialize_model(config, model_config=config.speculative_config.draft_model_config)


def loaded_heads(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of the draft that vLLM loads beside a model, which gets no weights."""
    config = drafting_config(folder)
    of_draft, how = config.speculative_config.draft_model_config, config.speculative_config.draft_load_config
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        initialize_model(config)
        draft = get_model(vllm_config=config, model_config=of_draft, load_config=how or config.load_config)
    return dict(draft.named_parameters())


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("scheme", BOTH)
def test_heads_are_merged_if_vllm_finds_each_of_their_weights(kind: str, scheme: str, tmp_path: Path) -> None:
    """A tensor is taken out, one after another."""
    source = open_source(scheme, make_mtp_pair(tmp_path, kind, quantised=BOTH)[scheme])
    loaded = {name: load_tensor(ref) for name, ref in source.tensors.items()}
    with one_rank(tmp_path):
        draft = empty_draft(drafting_config(source.folder))
        parameters = dict(draft.named_parameters())
        for left_out in [None, *filter(is_of_head, loaded)]:
            mark(parameters)
            draft.load_weights((name, loaded[name]) for name in loaded if name != left_out)
            misses = [name for name in unwritten(parameters) if not name.endswith(FROM_TARGET)]
            tensors = {name: ref for name, ref in source.tensors.items() if name != left_out}
            try:
                check_parameters(replace(source, tensors=tensors))
            except FlexQuantError as e:
                assert misses or str(left_out).endswith("weight_shape"), e
            else:
                assert not misses, left_out


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_heads_are_loaded_as_from_their_source(kind: str, tmp_path: Path) -> None:
    with one_rank(tmp_path):
        for number, quantised in enumerate(QUANTISED):
            pair = make_mtp_pair(work := tmp_path / str(number), kind, quantised=quantised)
            merge_checkpoints({name: pair[name] for name in ("w4a16", "w8a8")}, work / "merged")
            split_checkpoint(work / "merged", "w4a16", work / "split")
            found, expected = loaded_heads(work / "merged"), loaded_heads(work / "split")
            assert found.keys() == expected.keys()
            assert any(name.endswith("weight_packed") for name in found) == bool(quantised)
            assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("kind", "heads", "quantised"),
    [
        ("MiMo", ("w8a8",), ("w8a8",)),
        *(
            pytest.param(kind, BOTH, quantised, marks=pytest.mark.full)
            for kind in [*KINDS][:-2]  # stock vLLM for CPUs does not draft for models with a state
            for quantised in QUANTISED
        ),
    ],
)
def test_drafts_are_those_of_stock_and_are_verified_under_each_plan(kind, heads, quantised, tmp_path):
    pair = make_mtp_pair(tmp_path, kind, heads=heads, quantised=quantised)
    merge_checkpoints(pair, tmp_path / "merged")
    union = every_plan_of([*POLICIES.values()])
    with engine(tmp_path / "merged", union, max_model_len=256) as llm:
        without = answers_by_policy(llm)
    with drafting(tmp_path / "merged", union) as (llm, drafts):
        found = answers_by_policy(llm, drafts)
    for policy, (given, drafted) in found.items():
        # GLM-Lite's router takes other experts in passes of another size, in stock vLLM too.
        if (kind, policy) != ("GLM-Lite", "changing"):
            assert_alike(given, without[policy][0], wholly=0.3)
        assert drafted and all(ids for ids in drafted[0]), "every prompt has a draft after its prefill"
    first = heads[0]  # with heads in both, the first source's are read
    split_checkpoint(tmp_path / "merged", first, tmp_path / "split")
    with drafting(tmp_path / "split") as (llm, of_stock):
        stock = answers(llm, PROMPTS, **SAMPLING)
    assert_alike(found[first][0], stock)
    assert found[first][1][:FIRST] == of_stock[:FIRST]


def test_a_published_checkpoint_drafts_with_its_heads(tmp_path: Path) -> None:
    """It is served as it is, in one copy."""
    pair = make_mtp_pair(tmp_path, "MiMo", heads=("w4a16",), quantised=("w4a16",))
    with drafting(pair["w4a16"], "w4a16", config_format="flexquant") as (llm, drafts):
        found = answers(llm, PROMPTS, **SAMPLING)
    with drafting(pair["w4a16"]) as (llm, of_stock):
        assert_alike(found, answers(llm, PROMPTS, **SAMPLING))
    assert drafts[:FIRST] == of_stock[:FIRST]


@pytest.mark.full
def test_heads_can_be_those_of_another_checkpoint(tmp_path: Path) -> None:
    pair = make_mtp_pair(tmp_path, "MiMo", heads=())
    merge_checkpoints(pair, tmp_path / "merged")
    heads = make_mtp_pair(tmp_path / "other", "MiMo", quantised=("w8a8",))["w8a8"]
    by_others = DRAFTED | {"model": str(heads)}
    with drafting(tmp_path / "merged", "w8a8", by_others) as (llm, drafts):
        found = answers(llm, PROMPTS, **SAMPLING)
    with drafting(pair["w8a8"], None, by_others) as (llm, of_stock):
        assert_alike(found, answers(llm, PROMPTS, **SAMPLING))
    assert drafts[:FIRST] == of_stock[:FIRST]


def test_the_served_checkpoint_may_be_named_and_another_merged_one_does_not_draft(tmp_path: Path) -> None:
    for kind in ("DeepSeek", "GLM"):
        pair = make_mtp_pair(tmp_path / kind, kind)
        merge_checkpoints(pair, merged := tmp_path / kind / "merged")
        (link := tmp_path / kind / "link").symlink_to(merged)
        config = configure(merged, speculative_config={**DRAFTED, "model": str(link)})
        assert config.speculative_config.draft_load_config.load_format == LOAD_FORMAT
        shutil.copytree(merged, other := tmp_path / kind / "other")
        said = refusal(merged, speculative_config={**DRAFTED, "model": str(other)})
        assert "drafts of a merged checkpoint, but for the heads of the served one" in said


def test_without_heads_mtp_is_refused_with_a_way_out(tmp_path: Path) -> None:
    for kind in ("DeepSeek", "GLM"):  # whose drafts vLLM knows by the model's type and by its architecture
        pair = make_mtp_pair(tmp_path / kind, kind, heads=())
        merge_checkpoints(pair, merged := tmp_path / kind / "merged")
        assert "merge again, with a variant that has them" in refusal(merged, speculative_config=DRAFTED)
        published = {**DRAFTED, "model": str(make_mtp_pair(tmp_path / kind / "other", kind)["w8a8"])}
        assert configure(merged, speculative_config=published).speculative_config.method == "mtp"
