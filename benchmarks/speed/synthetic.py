# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints of random weights at real shapes, written directly as compressed-tensors would.

Speed does not depend on what a model says, but it does depend on its numbers: a GEMM of zeros draws less
power and clocks higher. The weights are therefore integers of a normal distribution, -127 to 127, and every
scheme stores the same ones: W8A8 as they are, W4A16 their upper four bits, FP8 and 16 bit converted. So the
variants are quantised copies of one model, and `flexquant merge` takes them as it takes real ones. The scales
keep activations finite: a weight's standard deviation is 1 / sqrt(inputs).

One decoder layer is one file, so memory stays at a layer. Random numbers come from the GPU if there is one; a
folder made on a GPU differs from one made on a CPU.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import save_file

from benchmarks.speed.shapes import Shape
from flexquant.checkpoint.merged_config import ARCHITECTURE, MergedConfig, StoredVariant
from flexquant.checkpoint.model_config import JsonObject

Tensors = dict[str, torch.Tensor]

GROUP_SIZES = (128, 64, 32)
"""Group sizes of W4A16, the preferred one first."""
DEVIATION = 32
"""Standard deviation of the 8-bit integers: the largest of a row of thousands is then near 127."""
PRESETS = {
    "w8a8": ("W8A8", "int-quantized"),
    "w4a16": ("W4A16", "pack-quantized"),
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "w8a16": ("W8A16", "pack-quantized"),
}
SCHEMES = ("bf16", *PRESETS)


def group_size(inputs: int) -> int:
    """Return the group size of W4A16 for a row of ``inputs`` weights: the preferred one that divides it."""
    return next(size for size in GROUP_SIZES if inputs % size == 0)


def quantisation_section(scheme: str, group: int = GROUP_SIZES[0]) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a scheme, W4A16 in groups of ``group``; None for bf16."""
    if scheme == "bf16":
        return None
    preset, form = PRESETS[scheme]
    layers = preset_name_to_scheme(preset, ["Linear"])
    if scheme == "w4a16":
        layers.weights.group_size = group
    section = QuantizationConfig(
        config_groups={"group_0": layers},
        ignore=["lm_head"],
        format=form,
        quantization_status="compressed",
    )
    return json.loads(section.model_dump_json())


def linear_tensors(scheme: str, outputs: int, inputs: int, name: str) -> Tensors:
    """Return a linear's tensors in a scheme, by the end of their keys (``weight``, ``weight_scale`` ...).

    The weights depend on ``name`` and the shape only, so all schemes have the same up to rounding.
    """
    integers = random_normal(name, outputs, inputs).mul_(DEVIATION).round_().clamp_(-127, 127)
    # W4A16's scale is 16 times this one, so that both are exact in bf16.
    scale = torch.tensor(1 / (DEVIATION * inputs**0.5)).bfloat16().float().item()
    if scheme == "w4a16":
        upper = (integers / 16).round_().clamp_(-8, 7).to(torch.int8).cpu()
        return {
            "weight_packed": pack_to_int32(upper, 4),  # int32 [outputs, inputs / 8]
            "weight_scale": torch.full(
                (outputs, inputs // group_size(inputs)), 16 * scale, dtype=torch.bfloat16
            ),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
    if scheme == "bf16":
        return {"weight": integers.mul_(scale).bfloat16().cpu()}
    of_rows = {"weight_scale": torch.full((outputs, 1), scale, dtype=torch.bfloat16)}
    if scheme == "w8a16":
        packed = pack_to_int32(integers.to(torch.int8).cpu(), 8)  # int32 [outputs, inputs / 4]
        return {"weight_packed": packed, "weight_shape": torch.tensor([outputs, inputs]), **of_rows}
    dtype = {"w8a8": torch.int8, "fp8": torch.float8_e4m3fn}[scheme]
    return {"weight": integers.to(dtype).cpu(), **of_rows}


def random_normal(name: str, rows: int, columns: int) -> torch.Tensor:
    """Return standard normal numbers, fp32 [rows, columns], the same for every call with these arguments."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name} {rows} {columns}".encode()))
    return torch.randn(rows, columns, generator=generator, device=device)


def layer_tensors(shape: Shape, scheme: str, layer: int) -> Tensors:
    """Return all tensors of a decoder layer by their keys in a checkpoint."""
    prefix = f"model.layers.{layer}."
    tensors = {
        f"{prefix}{norm}.weight": torch.ones(shape.hidden, dtype=torch.bfloat16)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for projection, (outputs, inputs) in shape.projections().items():
        name = prefix + projection
        found = linear_tensors(scheme, outputs, inputs, name)
        tensors |= {f"{name}.{key}": tensor for key, tensor in found.items()}
    return tensors


def outer_tensors(shape: Shape) -> Tensors:
    """Return embedding, final norm and lm_head, the same in every scheme."""
    names = ["model.embed_tokens.weight"] + ([] if shape.tied else ["lm_head.weight"])
    tensors = {"model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16)}
    for name in names:
        numbers = random_normal(name, shape.vocabulary, shape.hidden) / shape.hidden**0.5
        tensors[name] = numbers.bfloat16().cpu()
    return tensors


def write_checkpoint(folder: Path, shape: Shape, scheme: str) -> None:
    """Write the model of a shape in a scheme; ``folder`` is there only when it is complete."""
    stage = _stage(folder)
    weight_map: dict[str, str] = {}
    total = 0
    count = shape.layers + 1
    for number in range(count):
        is_layer = number < shape.layers
        tensors = layer_tensors(shape, scheme, number) if is_layer else outer_tensors(shape)
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file(tensors, stage / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    section = quantisation_section(scheme)
    config = shape.config() | ({"quantization_config": section} if section else {})
    _complete(stage, folder, shape, {"model.safetensors.index.json": index, "config.json": config})


def write_without_weights(folder: Path, shape: Shape, schemes: Sequence[str]) -> None:
    """Write a merged checkpoint of a shape without tensors, for vLLM's ``--load-format dummy``."""
    merged = MergedConfig(
        shape.config()["architectures"][0],
        {
            name: StoredVariant(f"{name}.", quantisation_section(name) or {}, not shape.tied, False)
            for name in schemes
        },
        (*(() if shape.tied else ("lm_head",)), "model.embed_tokens", "model.norm"),
    )
    config = {"architectures": [ARCHITECTURE], "quantization_config": merged.to_json()}
    _complete(_stage(folder), folder, shape, {"config.json": shape.config() | config})


def _stage(folder: Path) -> Path:
    """Return a new folder beside ``folder``, to be filled."""
    stage = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    return stage


def _complete(stage: Path, folder: Path, shape: Shape, documents: JsonObject) -> None:
    """Write JSON files and a tokenizer, and give the stage its name."""
    for name, document in (documents | word_tokenizer(shape.vocabulary)).items():
        (stage / name).write_text(json.dumps(document) + "\n", encoding="utf-8")
    stage.rename(folder)


def word_tokenizer(vocabulary: int) -> dict[str, Any]:
    """Return the files of a tokenizer with one word a token, so that text and tokens match exactly.

    Token n is the word ``tn``; 0 begins and 1 ends a text. The space before a word belongs to its token:
    vLLM refuses a prompt with more characters than its limit of tokens can have.
    """
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    words = ["<s>", "</s>", *(f"▁t{number}" for number in range(2, vocabulary))]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": words[i], **special} for i in range(2)],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": "</s>",
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
