# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The models on which benchmarks compare methods: a rotated one, and one that is trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import rotated, small_model
from tests.checkpoints import make_checkpoint


def test_a_rotated_model_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = make_checkpoint(tmp_path / "model", scheme=None), tmp_path / "rotated"
    monkeypatch.setattr(sys, "argv", ["rotated.py", str(source), "--output", str(output)])
    rotated.main()
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (source, output)
    ]
    ids = torch.arange(3, 35)[None]
    before, after = (model(ids).logits.detach() for model in models)
    assert (after - before).abs().max() < 0.03 * before.abs().max()
    weights = [model.model.layers[0].self_attn.q_proj.weight for model in models]
    assert (weights[1] - weights[0]).norm() > 0.5 * weights[0].norm()
    assert (output / "tokenizer.json").is_file()


def test_a_small_model_learns() -> None:
    torch.manual_seed(0)
    text = Path(small_model.__file__).read_text() * 4
    tokenizer = small_model.train_tokenizer([text])
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(ids[:200]) == text[: len(tokenizer.decode(ids[:200]))]
    assert tokenizer("text")["input_ids"][0] == tokenizer.bos_token_id
    model = small_model.make_model(num_layers=1)

    def loss() -> float:
        row = ids[None, : small_model.LENGTH]
        return model(input_ids=row, labels=row).loss.item()

    before = loss()
    small_model.train(model, ids, steps=8, warm_up=2)
    assert loss() < 0.9 * before
