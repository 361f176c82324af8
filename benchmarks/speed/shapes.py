# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The shapes that the speed benchmarks run at: models by name, and the linear layers of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-shaped model; every projection is a multiple of 128 wide, for groups of 128."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    """Whether lm_head is the embedding."""
    max_length: int = 32768

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        """Return the sizes that a checkpoint's ``config.json`` names."""
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's 16-bit keys and values, all layers together."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return the linears of a decoder layer as checkpoints hold them: name -> (outputs, inputs)."""
        queries, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def fused_projections(self) -> dict[str, tuple[int, int]]:
        """Return a decoder layer's linears as vLLM runs them, and the lm_head: name -> (outputs, inputs)."""
        queries, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv_proj": (queries + 2 * kv, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_up_proj": (2 * self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
            "lm_head": (self.vocabulary, self.hidden),
        }

    def config(self) -> dict[str, Any]:
        """Return the ``config.json`` of the 16-bit model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }


SHAPES = {
    "tiny": Shape(128, 256, 2, heads=4, kv_heads=2, head_dim=32, vocabulary=512, max_length=2048),
    "small": Shape(512, 1536, 8, heads=8, kv_heads=4, head_dim=64, vocabulary=8192, tied=True),
    "0.5b": Shape(896, 4864, 24, heads=14, kv_heads=2, head_dim=64, vocabulary=151936, tied=True),
    "1.5b": Shape(1536, 8960, 28, heads=12, kv_heads=2, head_dim=128, vocabulary=151936, tied=True),
    "llama-3.1-8b": Shape(4096, 14336, 32, heads=32, kv_heads=8, head_dim=128, vocabulary=128256),
    "qwen2.5-32b": Shape(5120, 27648, 64, heads=40, kv_heads=8, head_dim=128, vocabulary=152064),
    "qwen2.5-32b-32layers": Shape(5120, 27648, 32, heads=40, kv_heads=8, head_dim=128, vocabulary=152064),
    "llama-70b-8layers": Shape(8192, 28672, 8, heads=64, kv_heads=8, head_dim=128, vocabulary=128256),
}
"""Shapes by name: Qwen2.5-0.5B, 1.5B and 32B, Llama-3.1-8B, layers of the large ones, and two small ones."""
