# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a checkpoint's projections do to the residual stream, whatever norm their scales were folded into.

A block reads the residual stream through an RMS norm and writes back through `o_proj` and `down_proj`.
Moving a factor from the norm's weight into the projection's columns changes both tensors and nothing
else, so maps are compared with such factors multiplied out:

    K, V      W * norm (columns); so too what multi-head latent attention caches for both
    attention o_proj, times the norm behind it where there is one (rows; Gemma 2 and 3, OLMo 2)
    MLP       down_proj, likewise; a factor between up_proj's rows and its columns is multiplied out too
    router    W * norm (columns), as K and V
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.module_names import EXPERTS, LATENT_UP, LAYER, decoder_roots
from flexquant.checkpoint.safetensors_io import TensorRef, load_tensor
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError
from flexquant.merge.kv.dequantize import WeightReader
from flexquant.merge.kv.norms import Norms
from flexquant.merge.kv.sampling import BLOCK_ROWS, row_numbers, sample_rows
from flexquant.merge.kv.scaled_rows import ScaledMatrix, ScaledRows

CHUNK_WEIGHTS = 1 << 18  # weights in memory at a time, per variant: 1 MiB as float32, kind to caches
CACHED = ("k_proj", "v_proj")
LATENT = "kv_a_proj_with_mqa"
"""In the place of both with multi-head latent attention: a compressed K and V, and a part of K."""
DOWN_AND_UP = {"down_proj": ("up_proj", "gate_up_proj"), "w2": ("w3",)}
ROUTERS = ("gate", "router")
"""Names of a Linear, beside ``experts``, that gives each expert a score."""
STATE = re.compile(r"\.(A_log|conv1d\.weight|conv\.weight)$")
"""Ends the name of a tensor in what carries a state from token to token."""
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

    def cached(self, layer: int) -> dict[str, Rows]:
        """Return where the projections are that fill the KV cache, by name: K and V, or the latent of both.

        Raises FlexQuantError for a layer with none, or with a cache beside this one.
        """
        attention = f"{self.root}layers.{layer}.self_attn"
        if self._has(f"{attention}.indexer.wk"):
            raise FlexQuantError(
                f"layer {layer} of variant '{self.source.name}' has sparse attention, whose indexer has a "
                "cache of its own that is not compared; only models with plain or latent attention in "
                "every layer can be merged"
            )
        if mixer := self._mixers.get(f"{self.root}layers.{layer}."):
            raise FlexQuantError(
                f"layer {layer} of variant '{self.source.name}' has a state of its own in '{mixer}' that is "
                "not compared; only models with plain or latent attention in every layer can be merged"
            )
        if self._has(latent := f"{attention}.{LATENT}"):
            return {LATENT: Rows(latent, 0, self.reader.shape(latent)[0])}
        return {name: self._kv_rows(layer, name) for name in CACHED}

    @cached_property
    def _mixers(self) -> dict[str, str]:
        """State-space mixers, linear attention and convolutions over tokens, by the prefix of the layer."""
        found = {}
        for name in self.source.tensors:
            layer, state = LAYER.search(name), STATE.search(name)
            if layer is not None and state is not None:
                found[name[: layer.end()]] = name[: state.start()]
        return found

    def _kv_rows(self, layer: int, projection: str) -> Rows:
        attention = f"{self.root}layers.{layer}.self_attn"
        if self._has(own := f"{attention}.{projection}"):
            return Rows(own, 0, self.reader.shape(own)[0])
        if self._has(fused := f"{attention}.qkv_proj"):
            size = self.kv_heads * self.head_dim
            start = self.heads * self.head_dim + (size if projection == "v_proj" else 0)
            return Rows(fused, start, start + size)
        raise FlexQuantError(
            f"layer {layer} of variant '{self.source.name}' has neither '{own}' nor '{fused}', so its KV "
            "cache cannot be compared; only models with plain or latent attention in every layer can be "
            "merged"
        )

    def bias(self, rows: Rows) -> torch.Tensor | None:
        ref = self.source.tensors.get(f"{rows.module}.bias")
        return None if ref is None else load_tensor(ref).float()[rows.start : rows.stop]

    def kv(self, layer: int, rows: Rows) -> ScaledMatrix:
        """Return the effective map to what is cached, [rows, hidden]."""
        columns = self.norm(layer, "input_layernorm")
        return self._matrix(rows.module, [range(rows.start, rows.stop)], columns)

    def latent_up(self, layer: int) -> dict[str, TensorRef]:
        """Return the tensors that expand a latent cache, by name; none for plain attention."""
        prefix = f"{self.root}layers.{layer}."
        return {
            name: ref
            for name, ref in self.source.tensors.items()
            if name.startswith(prefix) and LATENT_UP.match(name)
        }

    def output_modules(self, layer: int) -> list[str]:
        """Return the Linears that write to the residual stream, below the layer: o_proj, every down_proj."""
        return self._output_modules.get(f"{self.root}layers.{layer}.", [])

    @cached_property
    def _output_modules(self) -> dict[str, list[str]]:
        """By the prefix of the layer, in alphabetical order."""
        found = defaultdict(set)
        for name in self.source.tensors:
            layer = LAYER.search(name)
            if layer is not None and WEIGHT.search(name):
                module = WEIGHT.sub("", name[layer.end() :])
                if module == "self_attn.o_proj" or module.rpartition(".")[2] in DOWN_AND_UP:
                    found[name[: layer.end()]].add(module)
        return {prefix: sorted(modules) for prefix, modules in found.items()}

    def sample_of_output(self, layer: int, module: str) -> list[range]:
        """Return the rows to compare of what ``output_modules`` named."""
        turn = layer + self.output_modules(layer).index(module)
        return sample_rows(self.reader.shape(f"{self.root}layers.{layer}.{module}")[0], turn)

    def output(self, layer: int, module: str, rows: Sequence[range]) -> ScaledMatrix:
        """Return rows of what ``module`` adds to the residual stream, [rows, in]."""
        behind = None
        if self.vector(layer, "post_feedforward_layernorm.weight") is not None:
            attention = module.startswith("self_attn.")
            behind = self.norm(layer, f"post_{'attention' if attention else 'feedforward'}_layernorm")
        return self._matrix(f"{self.root}layers.{layer}.{module}", rows, row_factors=behind)

    def up_rows(self, layer: int, module: str) -> Rows | None:
        """Return where the up projection that feeds a down projection is.

        None for `o_proj`, and for a down projection without one.
        """
        parent, _, kind = module.rpartition(".")
        for up in DOWN_AND_UP.get(kind, ()):
            name = f"{self.root}layers.{layer}.{parent}.{up}"
            if self._has(name):
                stop = self.reader.shape(name)[0]
                return Rows(name, stop // 2 if up == "gate_up_proj" else 0, stop)
        return None

    def up(self, layer: int, up: Rows, sample: Sequence[range]) -> ScaledMatrix:
        """Return rows of the effective up projection, [rows, hidden],; the sample counts from 0."""
        rows = [range(up.start + part.start, up.start + part.stop) for part in sample]
        return self._matrix(up.module, rows, self._norm_before_mlp(layer))

    def routers(self, layer: int) -> list[str]:
        """Return the names, below the layer, of the Linears that choose among experts, if any."""
        outputs = self.output_modules(layer)
        parents = {found[0].removesuffix(".experts") for name in outputs if (found := EXPERTS.match(name))}
        names = [f"{parent}.{name}" for parent in sorted(parents) for name in ROUTERS]
        return [name for name in names if self._has(f"{self.root}layers.{layer}.{name}")]

    def router(self, layer: int, module: str) -> ScaledMatrix:
        """Return the effective map from the residual stream to the experts' scores, [experts, hidden]."""
        name = f"{self.root}layers.{layer}.{module}"
        return self._matrix(name, [range(self.reader.shape(name)[0])], self._norm_before_mlp(layer))

    def _norm_before_mlp(self, layer: int) -> torch.Tensor | None:
        sandwiched = self.vector(layer, "post_feedforward_layernorm.weight") is not None
        return self.norm(layer, "pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm")

    def embeddings(self, chunk_weights: int = CHUNK_WEIGHTS) -> ScaledMatrix:
        """Return token embeddings, [tokens, hidden]: a sample of at least four times hidden."""
        name = f"{self.root}embed_tokens"
        if not self._has(name):
            raise FlexQuantError(
                f"variant '{self.source.name}' has no '{name}', so its residual stream cannot be compared"
            )
        tokens, hidden = self.reader.shape(name)
        return self._matrix(name, sample_rows(tokens, 0, least=4 * hidden), chunk_weights=chunk_weights)

    def _has(self, module: str) -> bool:
        return f"{module}.weight" in self.source.tensors or f"{module}.weight_packed" in self.source.tensors

    def _matrix(
        self,
        module: str,
        rows: Sequence[range],
        columns: torch.Tensor | None = None,
        row_factors: torch.Tensor | None = None,
        chunk_weights: int = CHUNK_WEIGHTS,
    ) -> ScaledMatrix:
        linear = self.reader.open(module)

        def chunks() -> Iterator[ScaledRows]:
            for chunk in _in_chunks(rows, chunk_weights // linear.shape[1]):
                read = linear.read(chunk)
                if row_factors is not None:
                    read = replace(read, rows=read.rows * row_factors[row_numbers(chunk)])
                yield read

        if columns is None:
            columns = torch.ones(linear.shape[1], dtype=torch.float32)
        return ScaledMatrix(chunks(), columns)


def _in_chunks(rows: Sequence[range], most: int) -> Iterator[list[range]]:
    """Yield the rows in parts of at most ``most``, or of one block where that is more."""
    most = max(BLOCK_ROWS, most)
    chunk: list[range] = []
    for block in rows:
        for start in range(block.start, block.stop, most):
            part = range(start, min(start + most, block.stop))
            if chunk and sum(map(len, chunk)) + len(part) > most:
                yield chunk
                chunk = []
            chunk.append(part)
    if chunk:
        yield chunk


def _decoder_root(source: Source) -> str:
    """Return the prefix before ``layers.`` of the language model's decoder, e.g. ``model.``."""
    roots = decoder_roots(source.tensors)
    if len(roots) != 1:
        found = f"found {', '.join(sorted(roots))}" if roots else "found none"
        raise FlexQuantError(
            f"variant '{source.name}' should have one stack of decoder layers with tensors named "
            f"'<stack>layers.0.self_attn.*', but {found}; this architecture's KV cache cannot be compared"
        )
    return roots.pop()
