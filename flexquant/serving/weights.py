# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From the merged checkpoint's prefixed tensors to the variants, through each variant's own loader."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import torch

from flexquant.checkpoint.merged_config import SHARED_PREFIX, MergedConfig
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from flexquant.policy.rules import Derivation


REQUIRED_PARAMETER = re.compile(r"(^|\.)(w13_|w2_)?weight(_packed|_scale)?$")
"""Parameters that every checkpoint has; vLLM's schemes also create optional ones (zero points ...).

With ``w13_`` and ``w2_`` begin those that vLLM fuses from all experts of a layer.
"""

NamedTensor = tuple[str, torch.Tensor]


RUN = 64
"""Tensors handed over at once: several variants may want them, and a whole checkpoint is not to be held."""


class VariantLoader:
    """Hands tensors to variants; a module that variants share by reference is loaded by the first."""

    def __init__(
        self, variants: Mapping[str, Any], merged: MergedConfig, derived: Mapping[str, Derivation]
    ) -> None:
        """``variants``: by name, the models that were built; other variants' tensors are passed over."""
        self._variants = variants
        self._first = next(iter(variants))
        self._readers: dict[str, list[str]] = {}
        for name in variants:
            source = derived[name].source if name in derived else name
            self._readers.setdefault(merged.variants[source].prefix, []).append(name)
        self._by_reference = tuple(f"{module}." for module in merged.shared_modules)

    def wants(self, key: str) -> bool:
        """Whether a tensor of the merged checkpoint belongs to a variant that was built."""
        return key.startswith((SHARED_PREFIX, *self._readers))

    def load(self, weights: Iterable[NamedTensor]) -> set[str]:
        """Load all weights; return the names of the parameters, variant's name first.

        Every variant's own loader gets its tensors in the checkpoint's order and in several calls, of
        :data:`RUN` at most. vLLM's loaders keep nothing from one call to the next: of what they fuse, such as
        Q, K and V, each tensor is put into its part of the parameter by itself.

        Raises :class:`FlexQuantError` if a tensor is missing.
        """
        loaded: dict[str, set[str]] = {name: set() for name in self._variants}
        for prefix, tensors in _runs(weights):
            if prefix == SHARED_PREFIX:
                for name in self._variants:
                    loaded[name] |= self._load_shared(name, tensors)
            for name in self._readers.get(prefix, ()):
                loaded[name] |= self._variants[name].load_weights(tensors)
        self._check_complete(loaded)
        return {f"{name}.{parameter}" for name in loaded for parameter in loaded[name]}

    def _load_shared(self, name: str, tensors: list[NamedTensor]) -> set[str]:
        if name != self._first:
            tensors = [(key, tensor) for key, tensor in tensors if not key.startswith(self._by_reference)]
        return self._variants[name].load_weights(tensors)

    def _check_complete(self, loaded: Mapping[str, set[str]]) -> None:
        of_variant = {
            name: dict(variant.named_parameters(remove_duplicate=False))
            for name, variant in self._variants.items()
        }
        # A parameter may have several names, in one variant or by reference in several.
        filled = {id(of_variant[name][p]) for name in loaded for p in loaded[name] & of_variant[name].keys()}
        for name, variant in self._variants.items():
            missing = [
                parameter
                for parameter, tensor in variant.named_parameters()
                if REQUIRED_PARAMETER.search(parameter) and id(tensor) not in filled
            ]
            if missing:
                raise FlexQuantError(
                    f"variant '{name}' of the merged checkpoint lacks {len(missing)} tensors, the first for "
                    f"'{missing[0]}'; check it with 'flexquant verify', or merge again. If it is whole, this "
                    "vLLM's model has weights that the checkpoint was published without, and is not served"
                )


def _runs(weights: Iterable[NamedTensor]) -> Iterator[tuple[str, list[NamedTensor]]]:
    """Yield neighbours of one prefix together, at most :data:`RUN`, the prefix taken off their keys."""
    for prefix, group in groupby(weights, key=lambda item: _split(item[0])[0]):
        tensors = ((_split(key)[1], tensor) for key, tensor in group)
        while run := list(islice(tensors, RUN)):
            yield prefix, run


def _split(key: str) -> tuple[str, str]:
    """Split a merged key into its prefix, dot included, and the original key."""
    prefix, dot, name = key.partition(".")
    return prefix + dot, name
