# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Load the merged checkpoint's prefixed tensors into the variants, through each variant's own loader.

vLLM makes parameters of uninitialised memory. So a few numbers of every row are marked before loading, with
NaN or an integer, and what still has its marks afterwards was never written.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby, islice
from typing import Any

import torch

from flexquant.checkpoint.draft_heads import drafts
from flexquant.checkpoint.merged_config import SHARED_PREFIX, MergedConfig
from flexquant.checkpoint.module_names import HEAD, is_in, layer_number
from flexquant.checkpoint.safetensors_io import is_finite
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable
from flexquant.serving.worker.adapters import check_unsmoothed
from flexquant.serving.worker.rotations import RotationLoader

NamedTensor = tuple[str, torch.Tensor]

RUN = 64
"""Tensors that are passed on at once; several variants can need them, and not all fit into memory."""
NOT_LOADED = re.compile(
    r"(^|[._])(g_idx(_sort_indices)?|azp_adj|weight_shape|(input|q|k|v|prob)_((global_)?scale|zero_point))$"
)
"""Matches parameters that vLLM's schemes create and a checkpoint need not have."""
MARKED = 8
"""Numbers of a row that are marked; integers can have the mark's value by themselves."""


class VariantLoader:
    """Passes tensors to variants; the first variant that has a shared module loads it."""

    def __init__(
        self,
        variants: Mapping[str, Any],
        merged: MergedConfig,
        routes: RouteTable,
        *,
        must_be_unsmoothed: bool = False,
    ) -> None:
        """Prepare to load ``variants``, the layers in ``routes``; ``must_be_unsmoothed`` compares norms."""
        self._variants = variants
        self._layers = routes.layers
        self._num_layers = len(routes.plans[0].layers)
        self._drafts = partial(drafts, architecture=merged.base_architecture, num_layers=self._num_layers)
        self._must_be_unsmoothed = must_be_unsmoothed
        self._readers: dict[str, list[str]] = {}
        self._own_head: dict[str, bool] = {}
        for name in variants:
            source = merged.variants[routes.source(name)]
            self._readers.setdefault(source.prefix, []).append(name)
            self._own_head[name] = source.own_head
        self._rotations = RotationLoader(variants)
        self._check_key = merged.check_key
        self._by_reference = tuple(f"{module}." for module in merged.shared_modules)

    def wants(self, key: str) -> bool:
        """Whether a tensor of the merged checkpoint belongs to a variant and layer that were built."""
        prefix, name = self._split(key)
        is_needed = bool(self._takers(prefix, name) or self._rotated(prefix, name))
        return is_needed or self._is_compared(prefix, name)

    def _readers_of(self, prefix: str) -> list[str]:
        return list(self._variants) if prefix == SHARED_PREFIX else self._readers.get(prefix, [])

    def load(self, weights: Iterable[NamedTensor]) -> set[str]:
        """Load all weights in the checkpoint's order; return parameters' names, the variant's name first.

        Raises :class:`FlexQuantError` if a tensor is missing or not finite, and for forbidden smoothing.
        """
        parameters: dict[str, torch.nn.Parameter] = {}
        for name, variant in self._variants.items():
            parameters |= {f"{name}.{parameter}": t for parameter, t in variant.named_parameters()}
        mark(parameters)
        loaded: dict[str, set[str]] = {name: set() for name in self._variants}
        norms: dict[str, dict[str, torch.Tensor]] = {}
        for prefix, tensors in self._runs(weights):
            for key, tensor in tensors:
                for name in self._rotated(prefix, key):
                    self._rotations.load(name, key, tensor)
            for name in self._readers_of(prefix):
                own = [(key, tensor) for key, tensor in tensors if name in self._takers(prefix, key)]
                loaded[name] |= self._variants[name].load_weights(own)
            for key, tensor in tensors:
                if self._is_compared(prefix, key):
                    norms.setdefault(key, {})[self._readers[prefix][0]] = tensor
        check_unsmoothed(norms)
        self._rotations.finish()
        if missing := unwritten(parameters):
            name, _, parameter = missing[0].partition(".")
            lacks = f"tensors for {len(missing)} parameters, the first for '{parameter}' or a part of it"
            advice = "check it with 'flexquant verify', or merge again. If it is whole, this vLLM's model has"
            advice += " weights that the checkpoint was published without, and is not served"
            raise FlexQuantError(f"variant '{name}' of the merged checkpoint lacks {lacks}; {advice}")
        return {f"{name}.{parameter}" for name in loaded for parameter in loaded[name]}

    def _takers(self, prefix: str, key: str) -> list[str]:
        """Return the variants that a tensor is loaded into; for a shared module, only the first."""
        if self._drafts(key) or self._rotated(prefix, key):
            return []
        if (layer_number(key) or 0) >= self._num_layers:
            counted = f"its config.json says {self._num_layers} decoder layers, counted from 0"
            advice = "correct num_hidden_layers there, or in the sources, and merge again"
            raise FlexQuantError(f"the checkpoint holds '{key}', and {counted}; {advice}")
        is_head = HEAD.search(key) is not None  # of a variant without one, a copy of its embedding
        readers = [name for name in self._readers_of(prefix) if self._own_head[name] or not is_head]
        takers = [name for name in readers if is_in(key, self._layers[name])]
        held_once = prefix == SHARED_PREFIX and key.startswith(self._by_reference)
        return takers[:1] if held_once else takers

    def _rotated(self, prefix: str, key: str) -> list[str]:
        """Return the variants that have rotations of which a tensor holds the matrix."""
        return [name for name in self._readers_of(prefix) if self._rotations.takes(name, key)]

    def _is_compared(self, prefix: str, key: str) -> bool:
        is_norm = "norm" in key and not self._drafts(key)
        return self._must_be_unsmoothed and is_norm and prefix in self._readers

    def _runs(self, weights: Iterable[NamedTensor]) -> Iterator[tuple[str, list[NamedTensor]]]:
        """Yield each prefix with consecutive tensors, at most :data:`RUN`, whose keys lack the prefix."""
        for prefix, group in groupby(weights, key=lambda item: self._split(item[0])[0]):
            while run := list(islice(group, RUN)):
                for key, tensor in run:
                    self._check_key(key)
                    if not is_finite(tensor):
                        problem = f"tensor '{key}' holds NaN or infinite numbers"
                        raise FlexQuantError(f"{problem}; quantise the model again, and merge again")
                yield prefix, [(self._split(key)[1], tensor) for key, tensor in run]

    def _split(self, key: str) -> tuple[str, str]:
        """Split a merged key into its prefix, dot included, and the original key; unmerged ones have none."""
        if "" in self._readers:
            return "", key
        prefix, dot, name = key.partition(".")
        return prefix + dot, name


def mark(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Mark the parameters that a checkpoint has to have; those without memory are left out."""
    for name, parameter in parameters.items():
        for marked in _marked(name, parameter):
            marked.fill_(_mark_of(marked))


def unwritten(parameters: dict[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of the marked parameters that still have a row with its marks."""

    def has_mark(marked: torch.Tensor) -> torch.Tensor:
        return marked.float().isnan() if marked.is_floating_point() else marked == _mark_of(marked)

    def is_unwritten(name: str) -> bool:
        return any(bool(has_mark(rows).all(-1).any()) for rows in _marked(name, parameters[name]))

    return [name for name in parameters if is_unwritten(name)]


def _marked(name: str, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """Yield the marks in a parameter's first rows, w1's and w3's: a kernel can pad experts in the end."""
    data = parameter.detach()
    if data.is_meta or data.numel() == 0 or data.dtype is torch.bool or NOT_LOADED.search(name):
        return
    if data.ndim < 2:
        yield data.reshape(-1, 1)
    elif data.ndim == 2 and data.shape[1] < MARKED and not data.is_floating_point():
        rows = data.numel() // MARKED  # a few integers can be marks by chance
        yield data.flatten()[: rows * MARKED].view(rows, MARKED)
    elif data.ndim == 2:
        yield data[:, :MARKED]
        yield data[:MARKED].T
    else:
        yield data[..., :: max(1, data.shape[-2] // 2), :MARKED]


def _mark_of(data: torch.Tensor) -> float | int:
    """Return a number that does not fill a row by itself; two 4-bit numbers are the least and the largest."""
    if data.dtype is torch.uint8:
        return 0x0F
    return torch.nan if data.is_floating_point() else torch.iinfo(data.dtype).max // 3
