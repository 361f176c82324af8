# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints whose lm_head is stored quantised answer under each variant's policy as stock vLLM does."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.merge import merge_checkpoints, split_checkpoint
from tests.checkpoints import make_checkpoint
from tests.foreign import write_foreign
from tests.integration.conftest import check_variants, distance, generate
from tests.policies import rules
from tests.quantised_heads import quantise_head, write_pair

pytestmark = pytest.mark.engine

PROMPTS = ["The quick brown fox", "In the beginning was the word, and it took nine more words", "1, 2, 3"]
OPTIONS = {"dtype": "bfloat16", "max_model_len": 256, "sampling": {"prompt_logprobs": 3, "max_tokens": 8}}
FORMS = {
    "w8a16": 0.01,
    "w4a16": 0.01,
    "w4a16 by channel": 0.01,
    "w4a16 with zero points": 0.01,
    "w8a8": 0.02,
    "fp8": 0.05,
}
"""Scheme of a head -> most that stock vLLM differs, in nats, from the same model with the head in 16 bit."""
IN_INT4 = rules("- use: w4a16")


@pytest.mark.parametrize("form", FORMS)
def test_each_variant_answers_as_stock_vllm(form: str, tmp_path: Path) -> None:
    sources = write_pair(tmp_path, form, form)
    merge_checkpoints(sources, tmp_path / "merged")
    found, _ = check_variants(tmp_path / "merged", sources, PROMPTS, **OPTIONS)
    (plain,) = generate(tmp_path / "w8a8-plain", None, PROMPTS, **OPTIONS)
    assert distance(found.answers[0], plain.answers[0]) < FORMS[form]


def test_each_variant_multiplies_by_its_own_head(tmp_path: Path) -> None:
    sources = write_pair(tmp_path, "w8a16", None)
    merge_checkpoints(sources, tmp_path / "merged")
    *_, phases, w4a8 = check_variants(
        tmp_path / "merged", sources, PROMPTS, more=["phase", "w4a8"], **OPTIONS
    )
    assert {(p["phase"], p["plan"]) for p in phases.passes} == {("prefill", "w8a8"), ("decode", "w4a16")}
    assert {p["plan"] for p in w4a8.passes} == {"w4a8"}


@pytest.mark.parametrize("head", ["w8a16", "w4a16", "gptq"])
def test_one_copy_of_a_published_checkpoint_has_its_head(head: str, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", scheme="w4a16", vocab_size=384)
    folder = quantise_head(made, tmp_path / "int4", head if head in FORMS else "w4a16")
    if head not in FORMS:
        folder = write_foreign(folder, tmp_path / "foreign", head, lm_head=True)
    (stock,) = generate(folder, None, PROMPTS, **OPTIONS)
    policies = [IN_INT4, "one-copy"]
    alone, one_copy = generate(folder, policies, PROMPTS, config_format="flexquant", **OPTIONS)
    assert alone.answers == stock.answers
    assert {p["plan"] for p in one_copy.passes} == {"w8a8-from-int4", "w4a16"}
    assert distance(one_copy.answers[0], stock.answers[0]) < 0.2
    merge_checkpoints({"w4a16": folder}, tmp_path / "merged")
    (merged,) = generate(tmp_path / "merged", [IN_INT4], PROMPTS, **OPTIONS)
    assert distance(merged.answers[0], stock.answers[0]) < 0.01


def test_nested_variants_have_their_heads(tmp_path: Path) -> None:
    sources = write_pair(tmp_path, "w8a8", "w4a16")
    merge_checkpoints(sources, tmp_path / "merged", nested="near")
    split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "split")
    in_int8, in_int4 = generate(tmp_path / "merged", ["w8a8", "w4a16"], PROMPTS, **OPTIONS)
    (int8,) = generate(tmp_path / "split", None, PROMPTS, **OPTIONS)
    (int4,) = generate(sources["w4a16"], None, PROMPTS, **OPTIONS)
    own, other = (distance(in_int8.answers[0], of.answers[0]) for of in (int8, int4))
    assert own < 0.03 and own < other / 2, (own, other)
    assert distance(in_int4.answers[0], int4.answers[0]) < 0.01
