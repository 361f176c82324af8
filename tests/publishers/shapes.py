# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The pairs: how each differs from two checkpoints that llm-compressor wrote from one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import EXPERTS, StateDict, make_checkpoint
from tests.foreign import write_foreign
from tests.publishers import edits
from tests.publishers.edits import Edit
from tests.publishers.quark import quark_int8

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
GPTQ_AS_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "data_type": "int",
}
AWQ_AS_AUTO_ROUND = GPTQ_AS_AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}
QUARK_CHANNELS = {"by": "per_channel", "static": False}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@dataclass(frozen=True)
class Shape:
    """A pair of checkpoints ``w8a8`` and ``w4a16`` of one model, each with what its publisher changed."""

    name: str
    form: Mapping[str, Any] = field(default_factory=dict)
    """``method`` and settings of :func:`write_foreign` for the second; empty: as llm-compressor writes it."""
    first: tuple[Edit, ...] = ()
    """What the publisher of the first, ``w8a8``, changed."""
    second: tuple[Edit, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of :func:`merge_checkpoints`."""
    architecture: str = "llama"
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :func:`make_checkpoint` for both."""
    schemes: tuple[str | None, str | None] = ("w8a8", "w4a16")
    stock: Mapping[str, Any] | None = field(default_factory=dict)
    """Arguments with which stock vLLM serves the second; None: it does not serve it on a CPU."""
    transform: Any = None
    """A change of the 16-bit model before it becomes the second."""

    def write(self, folder: Path) -> dict[str, Path]:
        """Write both checkpoints, and return their folders by name."""
        settings = dict(self.form)
        method = settings.pop("method", None)
        scheme, other = self.schemes
        w8a8 = make_checkpoint(folder / "w8a8", self.architecture, scheme, **self.model)
        made = folder / ("compressed" if method else "w4a16")
        w4a16 = make_checkpoint(made, self.architecture, other, transform=self.transform, **self.model)
        if method:
            w4a16 = write_foreign(w4a16, folder / "w4a16", method, **settings)
        for edit in self.first:
            edit(w8a8)
        for edit in self.second:
            edit(w4a16)
        return {"w8a8": w8a8, "w4a16": w4a16}


def _smooth_v_to_o(state: StateDict) -> StateDict:
    """Fold a scale between V and O, as AWQ does in models without grouped queries."""
    scale = torch.linspace(0.5, 2.0, 128, dtype=torch.bfloat16)
    folded = {}
    for layer in range(2):
        v, o = (f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "vo")
        folded |= {v: state[v] * scale[:, None], o: state[o] / scale}
    return state | folded


BESIDE_16_BIT = partial(Shape, schemes=(None, "w4a16"))
"""A pair whose first is given in 16 bit, to be quantised by its edits."""
QUARK = partial(quark_int8, by="per_tensor", static=True)

SHAPES = (
    Shape("llm-compressor, both"),
    Shape(
        "llm-compressor of 2024: `compression_config`",
        second=(
            edits.edit_json(
                "config.json", lambda c: c.update(compression_config=c.pop("quantization_config"))
            ),
        ),
    ),
    Shape(
        "compressed-tensors with the keys of 2025",
        second=(edits.section(global_compression_ratio=1.5, sparsity_config={}, kv_cache_scheme=None),),
    ),
    Shape("llm-compressor's FP8 and INT4", schemes=("fp8", "w4a16"), stock=None),
    Shape(
        "AutoAWQ: no cache, other sampling keys",
        form={"method": "awq", "version": "GEMM"},
        second=(
            edits.config(use_cache=False, pad_token_id=0),
            edits.generation(eos_token_id=257, do_sample=True, bos_token_id=256),
        ),
    ),
    Shape(
        "AutoAWQ, settings in quant_config.json",
        form={"method": "awq", "version": "GEMM"},
        second=(edits.settings_in("quant_config.json", bits="w_bit", group_size="q_group_size"),),
        stock={"quantization": "awq"},
    ),
    Shape(
        "AutoAWQ, layers left out by parts of names",
        form={"method": "awq", "modules_to_not_convert": ["gate"]},
        stock=None,
    ),
    Shape(
        "AutoAWQ's GEMV",
        form={"method": "awq", "version": "gemv"},
        second=(edits.tensors(edits.in_gemv),),
    ),
    Shape("AutoGPTQ", form={"method": "gptq"}, second=(edits.tensors(edits.zero_biases),)),
    Shape(
        "AutoGPTQ, settings in quantize_config.json, its own file name",
        form={"method": "gptq"},
        second=(edits.settings_in("quantize_config.json"), edits.renamed("gptq_model-4bit-128g.safetensors")),
        stock={"quantization": "gptq"},
    ),
    Shape(
        "AutoGPTQ with desc_act",
        form={"method": "gptq", "desc_act": True},
        second=(edits.tensors(edits.reordered),),
    ),
    Shape(
        "GPTQ packed for Marlin",
        form={"method": "gptq", "is_marlin_format": True},
        second=(edits.tensors(edits.packed_for_marlin),),
    ),
    Shape("GPTQModel, the newer format", form={"method": "gptq", "checkpoint_format": "gptq_v2"}),
    Shape("GPTQModel, layers left out", form={"method": "gptq", "dynamic": {"-:.*lm_head": {}}}),
    Shape(
        "GPTQModel, other bits for some layers",
        form={"method": "gptq", "dynamic": {"+:.*down": {"bits": 8}}},
        second=(edits.requantised(".*down", bits=8),),
        stock=None,
    ),
    Shape(
        "GPTQModel, other groups for some layers",
        form={"method": "gptq", "dynamic": {r"-:.*lm_head": {}, r"+:.*\.1\.": {"group_size": 32}}},
        second=(edits.requantised(r".*\.1\.", group_size=32),),
    ),
    Shape(
        "GPTQModel, other groups for a part of what vLLM fuses",
        form={"method": "gptq", "dynamic": {r".*\.v_proj": {"group_size": 32}}},
        second=(edits.requantised(r".*\.v_proj", group_size=32),),
    ),
    Shape("GPTQ with zero points", form={"method": "gptq", "sym": False}, stock=None),
    Shape("AutoRound as GPTQ", form={"method": "gptq", **GPTQ_AS_AUTO_ROUND}),
    Shape("AutoRound as AWQ", form={"method": "awq", **AWQ_AS_AUTO_ROUND}),
    BESIDE_16_BIT("AutoRound in block FP8 and INT4", first=(edits.auto_round_fp8,), stock=None),
    BESIDE_16_BIT(
        "AutoRound in FP8 without blocks",
        first=(edits.auto_round_fp8, edits.section(packing_format="auto_round:fp8_static", group_size=-1)),
    ),
    BESIDE_16_BIT("block FP8 (DeepSeek, Qwen) and INT4", first=(edits.block_fp8,), stock=None),
    BESIDE_16_BIT(
        "block FP8 scaled by powers of two (DeepSeek V3.1) and INT4",
        first=(partial(edits.block_fp8, scale_fmt="ue8m0"),),
        stock=None,
    ),
    BESIDE_16_BIT("16 bit and INT4"),
    BESIDE_16_BIT("Quark's INT8", first=(QUARK(),)),
    BESIDE_16_BIT(
        "Quark's INT8, weights per channel and activations per token",
        first=(quark_int8(by="per_channel", static=False),),
    ),
    BESIDE_16_BIT(
        "Quark's INT8, activations with zero points",
        first=(quark_int8(by="per_channel", static=True, symmetric=False),),
    ),
    BESIDE_16_BIT(
        "Quark's INT8, other settings for some layers", first=(QUARK(layers={"*down_proj": QUARK_CHANNELS}),)
    ),
    BESIDE_16_BIT(
        "Quark's INT8, other settings for a part of what vLLM fuses",
        first=(QUARK(layers={"*v_proj": QUARK_CHANNELS}),),
    ),
    Shape(
        "ModelOpt's INT8",
        first=(edits.section(quant_method="modelopt", quant_algo="W8A8_SQ_PER_CHANNEL"),),
    ),
    Shape("bf16 and fp16", second=(edits.in_half,)),
    Shape("bf16 and fp16, with `--dtype`", second=(edits.in_half,), options={"dtype": "bfloat16"}),
    BESIDE_16_BIT(
        "32 bit and INT4, with `--dtype`", first=(edits.stored_in("float32"),), options={"dtype": "bfloat16"}
    ),
    Shape(
        "transformers 4 and 5",
        first=(edits.as_transformers_4,),
        second=(edits.tokenizer(edits.merges_as_strings),),
    ),
    Shape(
        "keys of unsloth and of the Hub",
        first=(
            edits.config(
                unsloth_fixed=True, unsloth_version="2025.1", license="mit", _from_model_config=True
            ),
        ),
    ),
    Shape("a tokenizer with calibration's truncation", first=(edits.tokenizer(edits.left_by_calibration),)),
    Shape(
        "the chat template in another file",
        first=(edits.tokenizer_config(chat_template=TEMPLATE),),
        second=(edits.file("chat_template.jinja", TEMPLATE + "\n"),),
    ),
    Shape("a chat template on one side", second=(edits.file("chat_template.jinja", TEMPLATE),)),
    Shape(
        "another chat template",
        first=(edits.file("chat_template.jinja", TEMPLATE),),
        second=(edits.file("chat_template.jinja", TEMPLATE.replace(": ", "> ")),),
    ),
    Shape(
        "another chat template, with `--tokenizer-from`",
        first=(edits.file("chat_template.jinja", TEMPLATE),),
        second=(edits.file("chat_template.jinja", TEMPLATE.replace(": ", "> ")),),
        options={"tokenizer_from": "w8a8"},
    ),
    Shape("the tokenizer of another base model", second=(edits.tokenizer(edits.swapped_tokens),)),
    Shape("other sampling defaults", second=(edits.generation(temperature=0.6, eos_token_id=257),)),
    Shape(
        "other sampling defaults, with `--generation-from`",
        second=(edits.generation(temperature=0.6, eos_token_id=257),),
        options={"generation_from": "w4a16"},
    ),
    Shape("a program beside the weights", first=(edits.file("quantize.py", "print('made by')"),)),
    Shape("RoPE's frequencies among the tensors", first=(edits.tensors(edits.frequencies),)),
    Shape(
        "other RoPE scaling", second=(edits.config(rope_parameters={"rope_type": "linear", "factor": 2.0}),)
    ),
    Shape("another norm epsilon", second=(edits.config(rms_norm_eps=1e-05),)),
    Shape(
        "FP8 scales of the cache on one side",
        first=(edits.section(kv_cache_scheme=CACHE), edits.tensors(edits.cache_scales)),
    ),
    Shape("Llama 2 (own head for each query), AWQ", form={"method": "awq"}, model={"num_key_value_heads": 4}),
    Shape(
        "the same, AWQ with v to o folded",
        form={"method": "awq"},
        model={"num_key_value_heads": 4},
        transform=_smooth_v_to_o,
    ),
    Shape("Qwen 2.5, GPTQ", form={"method": "gptq"}, architecture="qwen2"),
    Shape("Qwen 3, AWQ", form={"method": "awq"}, architecture="qwen3"),
    Shape("Gemma 3, GPTQ", form={"method": "gptq"}, architecture="gemma3"),
    Shape("Mistral, GPTQ", form={"method": "gptq"}, architecture="mistral"),
    Shape(
        "Mixtral, AWQ",
        form={"method": "awq", "modules_to_not_convert": ["gate"]},
        architecture="mixtral",
        stock=None,
    ),
    Shape("Qwen 2 MoE, GPTQ", form={"method": "gptq"}, architecture="qwen2_moe", stock=None),
    Shape(
        "Qwen 3 MoE, AWQ",
        form={"method": "awq", "modules_to_not_convert": ["mlp.gate"]},
        architecture="qwen3_moe",
        stock=None,
    ),
    Shape(
        "Qwen 2 MoE, GPTQ, its experts in 16 bit on both sides",
        form={"method": "gptq", "dynamic": {r"-:.*\.experts": {}, "-:.*gate$": {}}},
        architecture="qwen2_moe",
        model={"ignore": (EXPERTS,)},
    ),
    Shape(
        "Mistral with tekken.json on one side",
        first=(edits.file("tekken.json", "{}"),),
        architecture="mistral",
    ),
)
