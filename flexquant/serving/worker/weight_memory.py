# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Count how much memory weights take once kernels have laid them out.

The count covers what a rank holds after vLLM's ``process_weights_after_loading``: every parameter, and every
copy of a weight that a kernel has packed. Memory that several modules use counts once. On a CPU vLLM passes
weights to oneDNN, which does not report how much it holds, so its copy counts like the loaded weight. Buffers
and workspaces do not count, but for the weights and scales that a variant computes in each pass.
"""

import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import nn
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import SHARED
from flexquant.checkpoint.module_names import by_range, layer_number
from flexquant.checkpoint.weight_bytes import BytesByRange
from flexquant.serving.kernels.layers import expert_layers, expert_weights, kernel_of_layer, linear_sizes
from flexquant.serving.vllm_api import (
    AttentionLayerBase,
    CPUDNNLGEMMHandler,
    HadamardTransform,
    LinearBase,
    MoERunner,
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VocabParallelEmbedding,
)
from flexquant.serving.worker.one_copy import computed_bytes, is_view

WEIGHT = re.compile(r"(w13_|w2_)?weight(_packed)?$")
"""Matches the names of parameters that a kernel can remove; experts' begin with ``w13_`` or ``w2_``."""

IN_16_BIT = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
"""Methods of an lm_head in 16 bit; those of AWQ give it that of a linear."""


@dataclass(frozen=True)
class Piece:
    """A piece of memory with ``elements`` values in ``nbytes`` bytes."""

    identity: Hashable
    elements: int = field(compare=False)
    nbytes: int = field(compare=False)


class WeightMemory:
    """The memory of models' weights; construct it once the models are built, ask it after loading."""

    def __init__(self, models: Mapping[str, nn.Module], to_be_packed: Collection[nn.Module] = ()) -> None:
        """Note the parameters of ``models`` (or single layers), by name, with the shapes and dtypes to load.

        ``to_be_packed``: modules, of models without weights, that a kernel will keep an additional copy of.
        """
        computed = {name: sizes for name, m in models.items() if any(sizes := computed_bytes(m))}
        self._kept = {name: kept for name, (_, kept) in computed.items()}
        self.written = {name: written for name, (written, _) in computed.items()}
        """Variant that computes its weights -> bytes that it writes them to; all write to the same memory."""
        self._models = {name: model for name, model in models.items() if not is_view(model)}
        self._to_be_packed = to_be_packed
        self._loaded = {m: loaded_weights(m) for model in self._models.values() for m in model.modules()}

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of each model's weights, and under ``shared`` those that several models use."""
        return {name: sum(sizes.values()) for name, sizes in self.nbytes_by_range().items()}

    def nbytes_by_range(self) -> BytesByRange:
        """Return the bytes of weights as :meth:`nbytes` does, by range of decoder layers."""
        sizes = self.nbytes_by_layer()
        if self.written:
            outside = sizes[SHARED if len(self.written) > 1 else next(iter(self.written))]
            outside[None] = outside.get(None, 0) + max(self.written.values())
        return {name: by_range(of_layers) for name, of_layers in sizes.items()}

    def nbytes_by_layer(self) -> dict[str, dict[int | None, int]]:
        """Return the same by decoder layer (None: outside of layers), but for what is in ``written``."""
        owners: dict[Piece, tuple[int | None, list[str]]] = {}
        for name, model in self._models.items():
            modules = model.named_modules()
            pieces = {piece: layer_number(path) for path, one in modules for piece in self._held(one)}
            for piece, layer in pieces.items():
                owners.setdefault(piece, (layer, []))[1].append(name)
        sizes: dict[str, dict[int | None, int]] = {name: {} for name in self._models}
        for name, nbytes in self._kept.items():
            sizes.setdefault(name, {})[None] = nbytes
        sizes[SHARED] = {}
        for piece, (layer, names) in owners.items():
            of_owner = sizes[SHARED if len(names) > 1 else names[0]]
            of_owner[layer] = of_owner.get(layer, 0) + piece.nbytes
        return sizes

    def nbytes_in_16_bit(self, model: nn.Module) -> int:
        """Return the bytes that the weights of a model, or of a view of several, would take in 16 bit.

        A weight counts two bytes, without scales. Modules but linears keep their kernels' copies.
        """
        elements = 0
        others: set[Piece] = set()
        in_experts: set[nn.Module] = {layer.routed_experts for layer in expert_layers(model)}
        for module in model.modules():
            if isinstance(module, LinearBase | MoERunner) or _is_quantised_head(module):
                bias = getattr(module, "bias", None)
                elements += count_weights(module) + (0 if bias is None else bias.numel())
            elif module not in in_experts:
                others |= set(self._held(module))
        return 2 * (elements + sum(piece.elements for piece in others))

    def _held(self, module: nn.Module) -> Iterator[Piece]:
        """Yield the memory of one module's own weights."""
        own = module.parameters(recurse=False)
        if isinstance(module, AttentionLayerBase) and any(p.is_meta for p in own):
            return  # scales of the KV cache, which vLLM frees once it has loaded them
        parameters = {name: p for name, p in module.named_parameters(recurse=False) if p.numel()}
        packed = list(packed_for_cpu(module))
        matrices = module.weight.partitions.values() if isinstance(module, HadamardTransform) else ()
        for tensor in (*parameters.values(), *matrices, *(p for p in packed if isinstance(p, torch.Tensor))):
            storage = tensor.untyped_storage()
            identity = storage.data_ptr() or id(tensor)  # without memory, the parameter itself
            yield Piece(identity, storage.nbytes() // tensor.itemsize, storage.nbytes())
        in_onednn = any(isinstance(p, CPUDNNLGEMMHandler) for p in packed)
        kept = {WEIGHT.sub(r"\1", name) for name in parameters if WEIGHT.match(name)}
        for name, weight in self._loaded.get(module, {}).items():
            # A kernel may keep a weight under another name, as Humming does.
            is_gone = WEIGHT.sub(r"\1", name) not in kept and not packed
            if in_onednn or is_gone or module in self._to_be_packed:
                yield weight


def loaded_weights(module: nn.Module) -> dict[str, Piece]:
    """Return name -> memory of the parameters of one module's own that a kernel can remove."""
    named = module.named_parameters(recurse=False)
    return {n: Piece((module, n), w.numel(), w.nbytes) for n, w in named if WEIGHT.match(n)}


def weights_of_layers(model: nn.Module) -> int:
    """Return how many weights the linears and experts of a model's decoder layers have on this rank."""
    in_layers = (module for path, module in model.named_modules() if layer_number(path) is not None)
    return sum(count_weights(m) for m in in_layers if isinstance(m, LinearBase | MoERunner))


def _is_quantised_head(module: nn.Module) -> TypeGuard[VocabParallelEmbedding]:
    """Whether a module is an lm_head with a kernel, and has weights of its own on this rank."""
    is_head = isinstance(module, VocabParallelEmbedding) and kernel_of_layer(module) is not None
    return is_head and any(p.numel() for p in module.parameters(recurse=False))


def count_weights(layer: LinearBase | VocabParallelEmbedding | MoERunner) -> int:
    """Return how many weights a linear layer, or the experts of a layer, have on this rank."""
    return expert_weights(layer) if isinstance(layer, MoERunner) else math.prod(linear_sizes(layer))


def packed_for_cpu(module: nn.Module) -> Iterator[torch.Tensor | CPUDNNLGEMMHandler]:
    """Yield the copies of a weight that vLLM's CPU kernels keep beside the parameters.

    Kernels for 16 bit keep theirs in a function, ``cpu_linear``; zentorch's put tensors beside parameters.
    """
    if isinstance(module, LinearBase):
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
    for cell in getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ():
        if isinstance(cell.cell_contents, (torch.Tensor, CPUDNNLGEMMHandler)):
            yield cell.cell_contents


def multiplied(model: nn.Module) -> list[VocabParallelEmbedding]:
    """Return the modules that compute logits: a model's lm_head, or its embedding if it has none."""
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return [module for module in embeddings if isinstance(module, ParallelLMHead)] or embeddings


def unpack_the_looked_up(model: nn.Module) -> None:
    """On a CPU, free the packed copies of embeddings that are only looked up: vLLM packs every embedding.

    In a tied model it packs the same weight twice, once for the embedding and once for the lm_head.
    """
    heads = multiplied(model)
    for module in model.modules():
        is_embedding = isinstance(module, VocabParallelEmbedding) and module not in heads
        if is_embedding and hasattr(module, "cpu_linear"):
            vars(module)["cpu_linear"] = torch.nn.functional.linear


def to_be_packed(model: nn.Module) -> list[VocabParallelEmbedding]:
    """Return the embeddings, of a model without weights, that this machine will keep a packed copy of."""
    if not current_platform.is_cpu():
        return []
    in_16_bit = (m for m in multiplied(model) if isinstance(m.quant_method, IN_16_BIT))
    return [module for module in in_16_bit if _is_packed(module)]


def _is_packed(embedding: VocabParallelEmbedding) -> bool:
    """Whether vLLM packs an embedding on this CPU, tried on a small one of the same dtype."""
    small, dtype = nn.Module(), embedding.get_parameter("weight").dtype
    small.weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=False)
    embedding.quant_method.process_weights_after_loading(small)
    return any(True for _ in packed_for_cpu(small))
