# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the norms of a model multiply with: their weight (Llama), or one plus their weight (Gemma, Nemotron).

The checkpoint does not say, and many families have either kind, so the model's own norm is asked: it is built
from the config, without memory for the rest of the model, and run with its weight at 0 and at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock

import torch

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import same_bytes
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError

TOLERANCE = 1e-4
# What transformers raises for a model that it does not have, or a config that it cannot read.
NOT_BUILT = (ValueError, TypeError, KeyError, AttributeError, ImportError)


class Norms:
    """The norms of the model that all sources are variants of."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._offsets: dict[str, float] = {}
        self._lock = Lock()

    def offset(self, name: str) -> float:
        """Return what the norm ``name`` of a decoder layer adds to its weight: usually 0 or 1.

        Where transformers does not know the model, 0 if the weights are equal in all sources, since it then
        makes no difference. Raises FlexQuantError where they are not.
        """
        with self._lock:  # asked by several threads
            if name not in self._offsets:
                found = None if self._layer is None else measure_offset(self._layer, name)
                if found is None:
                    self._check_equal(name)
                self._offsets[name] = found or 0.0
            return self._offsets[name]

    @cached_property
    def _layer(self) -> torch.nn.Module | None:
        """The first decoder layer, without memory for its weights."""
        return build_first_layer(self._sources[0].config)

    def _check_equal(self, name: str) -> None:
        first, *others = self._sources
        for tensor, ref in first.tensors.items():
            if tensor.endswith(f".{name}.weight"):
                for other in others:
                    if tensor in other.tensors and not same_bytes(ref, other.tensors[tensor]):
                        raise FlexQuantError(
                            f"'{tensor}' differs between '{first.name}' and '{other.name}', and whether a "
                            f"{first.architecture} multiplies by this weight or by one plus it is not known, "
                            "since the installed transformers has no such model; update transformers, or "
                            "quantise without moving scales into the norms"
                        )


def build_first_layer(config: JsonObject) -> torch.nn.Module | None:
    """Return the first decoder layer of a model, on torch's meta device; None for an unknown model."""
    from transformers import AutoConfig, AutoModel

    written = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.for_model(**written).get_text_config())
        return model.get_submodule("layers.0")
    except NOT_BUILT:
        return None


def measure_offset(layer: torch.nn.Module, name: str) -> float | None:
    """Return what a norm adds to its weight; None where the layer has no such norm, or it does otherwise."""
    try:
        norm = layer.get_submodule(name).to_empty(device="cpu").float()
        weight = norm.get_parameter("weight")
        (features,) = weight.shape
    except NOT_BUILT:
        return None
    x = torch.linspace(-1, 2, features)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
        at_zero = norm(x)
        weight.fill_(1)
        step = norm(x) - at_zero
    offset = float(at_zero @ step / (step @ step))
    explained = (at_zero - offset * step).abs().max() <= TOLERANCE * step.abs().max()
    return round(offset, 3) if bool(explained) else None
