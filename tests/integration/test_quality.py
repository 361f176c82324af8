# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A layered plan lies between the pure plans: KL divergence to the 16-bit model, on real text."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
import torch

from tests.integration.conftest import engine

pytestmark = pytest.mark.engine

TOKENS = 256
LAYERED = """
schema: flexquant.policy/v1
rules:
  - use: {default: w4a16, layers: {"0-14": w8a8}}
"""


def real_text() -> str:
    """English prose that comes with every Python: the language reference on naming and binding."""
    return topics["execmodel"]


def next_token_logprobs(folder, policy=None) -> torch.Tensor:
    """Logprobs of every token of the vocabulary after each token of the text: [TOKENS - 1, vocabulary]."""
    from vllm import SamplingParams

    logits = []
    with engine(folder, policy, max_num_seqs=1) as llm:
        model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        compute_logits = model.compute_logits

        def keep(hidden_states):
            logits.append(compute_logits(hidden_states))
            return logits[-1]

        model.compute_logits = keep
        ids = llm.get_tokenizer()(real_text())["input_ids"][:TOKENS]
        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
    (prompt_logits,) = [rows for rows in logits if rows.shape[0] == TOKENS - 1]
    return prompt_logits.double().log_softmax(dim=1)


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(reference || other) over positions, in nats."""
    return (reference.exp() * (reference - other)).sum(dim=1).mean().item()


def test_layered_plan_lies_between_the_pure_plans(real_model, real_merged, tmp_path):
    (tmp_path / "layered.yaml").write_text(LAYERED)
    reference = next_token_logprobs(real_model)
    kl = {
        policy: kl_divergence(reference, next_token_logprobs(real_merged, policy))
        for policy in ("w8a8", str(tmp_path / "layered.yaml"), "w4a16")
    }
    w8a8, layered, w4a16 = kl.values()
    print(f"KL to 16 bit in nats: w8a8 {w8a8:.4f}, layers 0-14 w8a8 {layered:.4f}, w4a16 {w4a16:.4f}")
    assert 0 < w8a8 < layered < w4a16
