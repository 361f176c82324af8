# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What mixing is for: on a real model and text, mixed plans and mixed phases lie between the pure ones."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest

from flexquant.evaluation.evaluating import evaluate
from flexquant.evaluation.settings import Settings

pytestmark = pytest.mark.engine

LAYERED = """
schema: flexquant.policy/v1
rules:
  - use: {default: w4a16, layers: {"0-14": w8a8}}
"""


def test_mixed_policies_lie_between_the_pure_ones(real_model, real_merged, tmp_path):
    text, layered = tmp_path / "text.txt", tmp_path / "layered.yaml"
    text.write_text("\n".join(topics[name] for name in sorted(topics)))
    layered.write_text(LAYERED)
    document = evaluate(
        real_merged,
        text,
        reference=real_model,
        policies=["w8a8", "w4a16", "phase", str(layered)],
        questions=[],
        settings=Settings(batch_sizes=(8,), samples=16, prompt_tokens=96, tokens=24),
    )
    kl = {r["policy"]: r["quality"]["mean_kl"] for r in document["results"]}
    print(f"KL to 16 bit in nats: {kl}")
    assert 0 < kl["w8a8"] < kl["layered.yaml"] < kl["w4a16"]
    assert 0 < kl["w8a8"] < kl["phase"] < kl["w4a16"]
