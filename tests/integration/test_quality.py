# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What mixing is for: on a real model and text, mixed plans and mixed phases lie between the pure ones."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import pytest
from transformers import AutoTokenizer

from flexquant.evaluation.inputs import Settings, read_rows
from flexquant.evaluation.measure import decode_forced, engine_options
from tests.integration.conftest import engine, every_plan_of, take_policy

pytestmark = pytest.mark.engine

LAYERED = """
schema: flexquant.policy/v1
rules:
  - use: {default: w4a16, layers: {"0-14": w8a8}}
"""
POLICIES = {"w8a8": "w8a8", "w4a16": "w4a16", "phase": "phase", "layered": LAYERED}
BATCH = 8
SETTINGS = Settings(batch_sizes=(BATCH,), samples=8, prompt_tokens=96, tokens=24)


def test_mixed_policies_lie_between_the_pure_ones(real_model, real_merged, tmp_path):
    text, union, reference = (tmp_path / name for name in ("text.txt", "union.yaml", "reference"))
    text.write_text("\n".join(topics[name] for name in sorted(topics)))
    union.write_text(every_plan_of(list(POLICIES.values())))
    rows = read_rows(text, AutoTokenizer.from_pretrained(real_model), SETTINGS)
    prompt = SETTINGS.prompt_tokens
    options = engine_options(BATCH, prompt, max_model_len=SETTINGS.row_tokens)
    with engine(real_model, **options) as llm:
        decode_forced(llm, rows, prompt, BATCH, tmp_path / "scores", store_in=reference)
    kl = {}
    with engine(real_merged, str(union), **options) as llm:
        for name, policy in POLICIES.items():
            take_policy(llm, policy)
            scores = decode_forced(llm, rows, prompt, BATCH, tmp_path / name, compare_with=reference)
            kl[name] = np.mean(scores.kl)
    print(f"KL to 16 bit in nats: {kl}")
    assert 0 < kl["w8a8"] < kl["layered"] < kl["w4a16"]
    assert 0 < kl["w8a8"] < kl["phase"] < kl["w4a16"]
