# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The pairs: how each differs from two checkpoints that llm-compressor wrote from one model."""

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
GPTQ_AS_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
GPTQ_AS_AUTO_ROUND |= {"data_type": "int"}
AWQ_AS_AUTO_ROUND = GPTQ_AS_AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}
QUARK_CHANNELS = {"by": "per_channel", "static": False}
NOT_GATES = {"modules_to_not_convert": ["gate"]}
WITH_TEMPLATE = edits.file("chat_template.jinja", TEMPLATE)
WITH_ANOTHER = edits.file("chat_template.jinja", TEMPLATE.replace(": ", "> "))
TEMPLATES = {"first": (WITH_TEMPLATE,), "second": (WITH_ANOTHER,)}
OTHER_SAMPLING = edits.generation(temperature=0.6, eos_token_id=257)
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


def _first(name: str, *changes: Edit, **more: Any) -> Shape:
    return Shape(name, first=changes, **more)


def _second(
    name: str, *changes: Edit, method: str = "", form: Mapping[str, Any] | None = None, **more: Any
) -> Shape:
    """Return a pair whose second is in another format, with settings ``form``, unless ``method`` is empty."""
    return Shape(name, {"method": method, **(form or {})} if method else {}, second=changes, **more)


AWQ, GPTQ = (partial(_second, method=method) for method in ("awq", "gptq"))
BESIDE_16_BIT = partial(_first, schemes=(None, "w4a16"))
"""A pair whose first is given in 16 bit, to be quantised by its edits."""
QUARK = partial(quark_int8, by="per_tensor", static=True)
OWN_HEADS = {"num_key_value_heads": 4}

SHAPES = (
    Shape("llm-compressor, both"),
    _second(
        "llm-compressor of 2024: `compression_config`",
        edits.edit_json("config.json", lambda c: c.update(compression_config=c.pop("quantization_config"))),
    ),
    _second(
        "compressed-tensors with the keys of 2025",
        edits.section(global_compression_ratio=1.5, sparsity_config={}, kv_cache_scheme=None),
    ),
    Shape("llm-compressor's FP8 and INT4", schemes=("fp8", "w4a16"), stock=None),
    AWQ(
        "AutoAWQ: no cache, other sampling keys",
        edits.config(use_cache=False, pad_token_id=0),
        edits.generation(eos_token_id=257, do_sample=True, bos_token_id=256),
        form={"version": "GEMM"},
    ),
    AWQ(
        "AutoAWQ, settings in quant_config.json",
        edits.settings_in("quant_config.json", bits="w_bit", group_size="q_group_size"),
        form={"version": "GEMM"},
        stock={"quantization": "awq"},
    ),
    AWQ("AutoAWQ, layers left out by parts of names", form=NOT_GATES, stock=None),
    AWQ("AutoAWQ's GEMV", edits.tensors(edits.in_gemv), form={"version": "gemv"}),
    GPTQ("AutoGPTQ", edits.tensors(edits.zero_biases)),
    GPTQ(
        "AutoGPTQ, settings in quantize_config.json, its own file name",
        *(edits.settings_in("quantize_config.json"), edits.renamed("gptq_model-4bit-128g.safetensors")),
        stock={"quantization": "gptq"},
    ),
    GPTQ("AutoGPTQ with desc_act", edits.tensors(edits.reordered), form={"desc_act": True}),
    GPTQ("GPTQ packed for Marlin", edits.tensors(edits.packed_for_marlin), form={"is_marlin_format": True}),
    GPTQ("GPTQModel, the newer format", form={"checkpoint_format": "gptq_v2"}),
    GPTQ("GPTQModel, layers left out", form={"dynamic": {"-:.*lm_head": {}}}),
    GPTQ(
        "GPTQModel, other bits for some layers",
        edits.requantised(".*down", bits=8),
        form={"dynamic": {"+:.*down": {"bits": 8}}},
        stock=None,
    ),
    GPTQ(
        "GPTQModel, other groups for some layers",
        edits.requantised(r".*\.1\.", group_size=32),
        form={"dynamic": {r"-:.*lm_head": {}, r"+:.*\.1\.": {"group_size": 32}}},
    ),
    GPTQ(
        "GPTQModel, other groups for a part of what vLLM fuses",
        edits.requantised(r".*\.v_proj", group_size=32),
        form={"dynamic": {r".*\.v_proj": {"group_size": 32}}},
    ),
    GPTQ("GPTQ with zero points", form={"sym": False}, stock=None),
    GPTQ("AutoRound as GPTQ", form=GPTQ_AS_AUTO_ROUND),
    AWQ("AutoRound as AWQ", form=AWQ_AS_AUTO_ROUND),
    BESIDE_16_BIT("AutoRound in block FP8 and INT4", edits.auto_round_fp8, stock=None),
    BESIDE_16_BIT(
        "AutoRound in FP8 without blocks",
        *(edits.auto_round_fp8, edits.section(packing_format="auto_round:fp8_static", group_size=-1)),
    ),
    BESIDE_16_BIT("block FP8 (DeepSeek, Qwen) and INT4", edits.block_fp8, stock=None),
    BESIDE_16_BIT(
        "block FP8 scaled by powers of two (DeepSeek V3.1) and INT4",
        partial(edits.block_fp8, scale_fmt="ue8m0"),
        stock=None,
    ),
    BESIDE_16_BIT("16 bit and INT4"),
    BESIDE_16_BIT("Quark's INT8", QUARK()),
    BESIDE_16_BIT(
        "Quark's INT8, weights per channel and activations per token",
        quark_int8(by="per_channel", static=False),
    ),
    BESIDE_16_BIT(
        "Quark's INT8, activations with zero points",
        quark_int8(by="per_channel", static=True, symmetric=False),
    ),
    BESIDE_16_BIT(
        "Quark's INT8, other settings for some layers", QUARK(layers={"*down_proj": QUARK_CHANNELS})
    ),
    BESIDE_16_BIT(
        "Quark's INT8, other settings for a part of what vLLM fuses",
        QUARK(layers={"*v_proj": QUARK_CHANNELS}),
    ),
    _first("ModelOpt's INT8", edits.section(quant_method="modelopt", quant_algo="W8A8_SQ_PER_CHANNEL")),
    _second("bf16 and fp16", edits.in_half),
    _second("bf16 and fp16, with `--dtype`", edits.in_half, options={"dtype": "bfloat16"}),
    BESIDE_16_BIT(
        "32 bit and INT4, with `--dtype`", edits.stored_in("float32"), options={"dtype": "bfloat16"}
    ),
    Shape(
        "transformers 4 and 5",
        first=(edits.as_transformers_4,),
        second=(edits.tokenizer(edits.merges_as_strings),),
    ),
    _first(
        "keys of unsloth and of the Hub",
        edits.config(unsloth_fixed=True, unsloth_version="2025.1", license="mit", _from_model_config=True),
    ),
    _first("a tokenizer with calibration's truncation", edits.tokenizer(edits.left_by_calibration)),
    Shape(
        "the chat template in another file",
        first=(edits.tokenizer_config(chat_template=TEMPLATE),),
        second=(edits.file("chat_template.jinja", TEMPLATE + "\n"),),
    ),
    _second("a chat template on one side", WITH_TEMPLATE),
    Shape("another chat template", **TEMPLATES),
    Shape("another chat template, with `--tokenizer-from`", **TEMPLATES, options={"tokenizer_from": "w8a8"}),
    _second("the tokenizer of another base model", edits.tokenizer(edits.swapped_tokens)),
    _second("other sampling defaults", OTHER_SAMPLING),
    _second(
        "other sampling defaults, with `--generation-from`",
        OTHER_SAMPLING,
        options={"generation_from": "w4a16"},
    ),
    _first("a program beside the weights", edits.file("quantize.py", "print('made by')")),
    _first("RoPE's frequencies among the tensors", edits.tensors(edits.frequencies)),
    _second("other RoPE scaling", edits.config(rope_parameters={"rope_type": "linear", "factor": 2.0})),
    _second("another norm epsilon", edits.config(rms_norm_eps=1e-05)),
    _first(
        "FP8 scales of the cache on one side",
        *(edits.section(kv_cache_scheme=CACHE), edits.tensors(edits.cache_scales)),
    ),
    AWQ("Llama 2 (own head for each query), AWQ", model=OWN_HEADS),
    AWQ("the same, AWQ with v to o folded", model=OWN_HEADS, transform=_smooth_v_to_o),
    GPTQ("Qwen 2.5, GPTQ", architecture="qwen2"),
    AWQ("Qwen 3, AWQ", architecture="qwen3"),
    GPTQ("Gemma 3, GPTQ", architecture="gemma3"),
    GPTQ("Mistral, GPTQ", architecture="mistral"),
    AWQ("Mixtral, AWQ", form=NOT_GATES, architecture="mixtral", stock=None),
    GPTQ("Qwen 2 MoE, GPTQ", architecture="qwen2_moe", stock=None),
    AWQ(
        "Qwen 3 MoE, AWQ",
        **{"form": {"modules_to_not_convert": ["mlp.gate"]}, "architecture": "qwen3_moe", "stock": None},
    ),
    GPTQ(
        "Qwen 2 MoE, GPTQ, its experts in 16 bit on both sides",
        form={"dynamic": {r"-:.*\.experts": {}, "-:.*gate$": {}}},
        **{"architecture": "qwen2_moe", "model": {"ignore": (EXPERTS,)}},
    ),
    _first("Mistral with tekken.json on one side", edits.file("tekken.json", "{}"), architecture="mistral"),
)
