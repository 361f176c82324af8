# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a checkpoint's projections do to the residual stream, whatever norm their scales were folded into.

A block reads the residual stream through an RMS norm and writes back through `o_proj` and `down_proj`.
Moving a factor from the norm's weight into the projection's columns changes both tensors and nothing
else, so maps are compared with such factors multiplied out:

    K, V      W * norm (columns)
    attention o_proj, times the norm behind it where there is one (rows; Gemma 2 and 3, OLMo 2)
    MLP       down_proj, likewise; a factor between up_proj's rows and its columns is multiplied out too
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.module_names import decoder_layer
from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError
from flexquant.merge.kv.dequantize import Dequantized, WeightReader
from flexquant.merge.kv.norms import Norms

CHUNK_WEIGHTS = 1 << 20  # weights in memory at a time, per variant: 4 MiB as float32, kind to caches
STACK = "layers."
DOWN_AND_UP = {"down_proj": ("up_proj", "gate_up_proj"), "w2": ("w3",)}
WEIGHT = re.compile(r"\.weight(_packed)?$")


@dataclass(frozen=True)
class Rows:
    """Rows ``start:stop`` of a Linear's weight: a whole projection, or its part of a fused one."""

    module: str
    start: int
    stop: int


class EffectiveMaps:
    """The maps of one source, read a few rows at a time."""

    def __init__(self, source: Source, norms: Norms) -> None:
        self.source = source
        self._norms = norms
        self.reader = WeightReader(source)
        self.config: JsonObject = text_config(source.config)
        self.num_layers = count_layers(source.config)
        self.root = _decoder_root(source)
        self.heads: int = self.config.get("num_attention_heads") or 0
        self.kv_heads: int = self.config.get("num_key_value_heads") or self.heads
        self.head_dim: int = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def vector(self, layer: int, name: str) -> torch.Tensor | None:
        """Return the tensor ``name`` of a layer as float32, None where there is none."""
        ref = self.source.tensors.get(f"{self.root}layers.{layer}.{name}")
        return None if ref is None else load_tensor(ref).float()

    def norm(self, layer: int, name: str) -> torch.Tensor | None:
        """Return what the norm ``name`` multiplies with, [features]; None where there is none."""
        weight = self.vector(layer, f"{name}.weight")
        return None if weight is None else weight + self._norms.offset(name)

    def kv_rows(self, layer: int, projection: str) -> Rows:
        """Return where ``k_proj`` or ``v_proj`` is; raise FlexQuantError for a layer without one."""
        attention = f"{self.root}layers.{layer}.self_attn"
        if self._has(own := f"{attention}.{projection}"):
            return Rows(own, 0, self.reader.shape(own)[0])
        if self._has(fused := f"{attention}.qkv_proj"):
            size = self.kv_heads * self.head_dim
            start = self.heads * self.head_dim + (size if projection == "v_proj" else 0)
            return Rows(fused, start, start + size)
        raise FlexQuantError(
            f"layer {layer} of variant '{self.source.name}' has neither '{own}' nor '{fused}', so its KV "
            "cache cannot be compared; only models with plain attention in every layer can be merged"
        )

    def bias(self, layer: int, projection: str) -> torch.Tensor | None:
        rows = self.kv_rows(layer, projection)
        ref = self.source.tensors.get(f"{rows.module}.bias")
        return None if ref is None else load_tensor(ref).float()[rows.start : rows.stop]

    def kv_chunks(self, layer: int, projection: str) -> Iterator[Dequantized]:
        """Yield the effective K or V map, [rows, hidden], in chunks of rows."""
        columns = self.norm(layer, "input_layernorm")
        return self._chunks(self.kv_rows(layer, projection), columns=columns)

    def output_modules(self, layer: int) -> list[str]:
        """Return the Linears that write to the residual stream, below the layer: o_proj, every down_proj."""
        prefix = f"{self.root}layers.{layer}."
        modules = {
            WEIGHT.sub("", name).removeprefix(prefix)
            for name in self.source.tensors
            if name.startswith(prefix) and WEIGHT.search(name)
        }
        return sorted(m for m in modules if m == "self_attn.o_proj" or m.rpartition(".")[2] in DOWN_AND_UP)

    def output_chunks(self, layer: int, module: str, columns: torch.Tensor | None) -> Iterator[Dequantized]:
        """Yield what ``module`` adds to the residual stream, [rows of hidden, in], in chunks of rows."""
        rows = None
        if self.vector(layer, "post_feedforward_layernorm.weight") is not None:
            attention = module.startswith("self_attn.")
            rows = self.norm(layer, f"post_{'attention' if attention else 'feedforward'}_layernorm")
        name = f"{self.root}layers.{layer}.{module}"
        return self._chunks(Rows(name, 0, self.reader.shape(name)[0]), columns, rows)

    def up_chunks(self, layer: int, module: str) -> Iterator[Dequantized] | None:
        """Yield the effective up projection, [intermediate, hidden], that feeds a down projection.

        None for `o_proj`, and for a down projection without one.
        """
        parent, _, kind = module.rpartition(".")
        for up in DOWN_AND_UP.get(kind, ()):
            name = f"{self.root}layers.{layer}.{parent}.{up}"
            if not self._has(name):
                continue
            stop = self.reader.shape(name)[0]
            rows = Rows(name, stop // 2 if up == "gate_up_proj" else 0, stop)
            sandwiched = self.vector(layer, "post_feedforward_layernorm.weight") is not None
            before = "pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm"
            return self._chunks(rows, columns=self.norm(layer, before))
        return None

    def embedding_chunks(self) -> Iterator[Dequantized]:
        """Yield the token embedding, [tokens, hidden], in chunks of rows."""
        name = f"{self.root}embed_tokens"
        if not self._has(name):
            raise FlexQuantError(
                f"variant '{self.source.name}' has no '{name}', so its residual stream cannot be compared"
            )
        return self._chunks(Rows(name, 0, self.reader.shape(name)[0]))

    def _has(self, module: str) -> bool:
        return f"{module}.weight" in self.source.tensors or f"{module}.weight_packed" in self.source.tensors

    def _chunks(
        self, rows: Rows, columns: torch.Tensor | None = None, row_factors: torch.Tensor | None = None
    ) -> Iterator[Dequantized]:
        step = max(1, CHUNK_WEIGHTS // self.reader.shape(rows.module)[1])
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            read = self.reader.read(rows.module, start, stop)
            weight, variance = read.weight, read.variance
            if columns is not None:
                weight, variance = weight * columns, variance * columns**2
            if row_factors is not None:
                factors = row_factors[start:stop, None]
                weight, variance = weight * factors, variance * factors**2
            yield Dequantized(weight, variance)


def _decoder_root(source: Source) -> str:
    """Return the prefix before ``layers.`` of the language model's decoder, e.g. ``model.``."""
    inside = (decoder_layer(name) for name in source.tensors if ".self_attn." in name)
    stacks = {match["stack"] for match in inside if match and match["index"] == "0"}
    roots = {stack.removesuffix(STACK) for stack in stacks if stack.endswith(STACK)}
    if len(roots) != 1:
        found = f"found {', '.join(sorted(roots))}" if roots else "found none"
        raise FlexQuantError(
            f"variant '{source.name}' should have one stack of decoder layers with tensors named "
            f"'<stack>layers.0.self_attn.*', but {found}; this architecture's KV cache cannot be compared"
        )
    return roots.pop()
