# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Synthetic checkpoints: equal weights in all schemes, readable, mergeable."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from benchmarks.speed.models import open_model
from benchmarks.speed.shapes import SHAPES, Shape
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.synthetic import SCHEMES, word_tokenizer
from flexquant.checkpoint.merged_config import MergedConfig

TINY = SHAPES["tiny"]


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def dequantise(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a linear's fp32 weights in any scheme, unpacked here by hand."""
    if (packed := tensors.get(f"{name}.weight_packed")) is not None:
        shape = tensors[f"{name}.weight_shape"].tolist()
        bits = 32 * packed.numel() // math.prod(shape)
        numbers = (packed.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)) & (1 << bits) - 1
        integers = (numbers - (1 << bits - 1)).flatten(1).float()
        assert list(integers.shape) == shape
        scale = tensors[f"{name}.weight_scale"].float()
        return integers * (scale if bits == 8 else scale.repeat_interleave(128, dim=1))
    weight = tensors[f"{name}.weight"]
    scaled = weight.dtype != torch.bfloat16
    return weight.float() * (tensors[f"{name}.weight_scale"].float() if scaled else 1)


def test_all_schemes_have_the_same_weights_up_to_rounding(checkpoints):
    tensors = {scheme: load(folder) for scheme, folder in checkpoints.items()}
    for layer in range(TINY.layers):
        for projection, (outputs, inputs) in TINY.projections().items():
            name = f"model.layers.{layer}.{projection}"
            found = {scheme: dequantise(tensors[scheme], name) for scheme in SCHEMES}
            exact = found["w8a8"]
            assert exact.shape == (outputs, inputs)
            assert exact.std().item() == pytest.approx(1 / math.sqrt(inputs), rel=0.05)
            torch.testing.assert_close(found["bf16"], exact, rtol=2**-8, atol=0)
            torch.testing.assert_close(found["fp8"], exact, rtol=2**-4, atol=0)
            assert torch.equal(found["w8a16"], exact)
            # A step of W4A16 is 16 steps of W8A8; 127 is at most 7 steps of W4A16.
            step = tensors["w8a8"][f"{name}.weight_scale"].float()
            off = ((found["w4a16"] - exact) / step).abs()
            assert off.max() <= 15 and off[(exact / step).abs() <= 120].max() <= 8 and off.mean() > 1
    # other layers have other weights
    assert not torch.equal(*(tensors["w8a8"][f"model.layers.{n}.mlp.up_proj.weight"] for n in range(2)))


def test_what_is_not_quantised_is_the_same_in_all_schemes(checkpoints):
    first, *others = (
        {name: tensor for name, tensor in load(folder).items() if "_proj." not in name}
        for folder in checkpoints.values()
    )
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < first.keys()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_synthetic_checkpoints_can_be_read(checkpoints):
    for scheme, folder in checkpoints.items():
        config = json.loads((folder / "config.json").read_text())
        assert replace(Shape.from_config(config), max_length=TINY.max_length) == TINY
        assert ("quantization_config" in config) == (scheme != "bf16")
        assert AutoConfig.from_pretrained(folder).num_hidden_layers == TINY.layers
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        tensors = load(folder)
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        for name, file in index["weight_map"].items():
            assert name in load_file(folder / file)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["w8a8"])
    assert tokenizer("t5 t511").input_ids == [5, 511]
    assert tokenizer.decode([7, 8]).split() == ["t7", "t8"] and len(tokenizer) == TINY.vocabulary


def test_prompts_of_a_synthetic_model_keep_their_length(tmp_path):
    from vllm.tokenizers import get_tokenizer

    for name, document in word_tokenizer(5000).items():
        (tmp_path / name).write_text(json.dumps(document))
    tokenizer = get_tokenizer(str(tmp_path))
    tokens = [*range(4700, 5000), *range(2, 40)]
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens
    assert len(tokenizer.decode(tokens[:300])) <= 300 * tokenizer.max_chars_per_token  # or vLLM refuses it


def test_synthetic_variants_merge_and_without_weights_say_the_same(tmp_path: Path) -> None:
    model = open_model(["tiny"], tmp_path)
    merged = model.folder(parse_subject("flexquant:w8a8"))
    assert merged == tmp_path / "tiny" / "merged-w8a8-w4a16"
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert model.folder(parse_subject("flexquant:phase-batch")) == merged
    assert model.folder(parse_subject("w8a8")) == tmp_path / "tiny" / "w8a8"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == made
    empty = model.without_weights(("w8a8", "w4a16"))
    assert not list(empty.glob("*.safetensors"))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (merged, empty)]
    sections = [MergedConfig.from_json(config.pop("quantization_config")) for config in configs]
    assert configs[0] == configs[1]
    kept = [(s.base_architecture, s.variants, s.mixable, set(s.shared_modules)) for s in sections]
    assert kept[0] == kept[1] and len(AutoTokenizer.from_pretrained(empty)) == TINY.vocabulary
