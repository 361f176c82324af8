# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Round INT8 weights by GPTQ to what can be nested in the INT4 weights of another variant.

A nested weight is stored as the difference to what INT4 predicts, in 4 bits; a few of each row are stored
whole. GPTQ of the differences, on INT8's grid with 4 bits, is GPTQ of the weights within reach, since its
corrections add up: what a weight cannot reach is made up for by the weights after it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.utils import update_offload_parameter
from llmcompressor.modifiers.gptq import GPTQModifier
from pydantic import Field
from torch import Tensor

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.module_names import fused_name
from flexquant.checkpoint.nested import (
    HIGHEST,
    LARGEST,
    LEAST,
    LOWEST,
    Int4Weight,
    blocks,
    count_exceptions,
    predict,
)
from flexquant.checkpoint.schemes import is_w8a8
from flexquant.errors import FlexQuantError
from flexquant.merge.nested_fit import fit_block, fit_column

Linear = Any
"""A linear with the scheme and the observers of llmcompressor."""
WHOLLY_IN_REACH = LARGEST - HIGHEST
"""Largest absolute prediction whose whole reach is within INT8's range."""


def read_int4(folder: Path) -> dict[str, Int4Weight]:
    """Return the INT4 weights of a variant's folder, by linear; raise FlexQuantError if it has none."""
    tensors = read_tensors(folder)
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    found = {module: weight for module in modules if (weight := Int4Weight.of(tensors, module))}
    if not found:
        raise FlexQuantError(f"{folder} has no INT4 weights to nest in; correct 'nested_in' in the recipe")
    return found


class GPTQWithinReach(GPTQModifier):
    """llmcompressor's GPTQ, for INT8 weights with one scale a row, which INT4 weights are to predict."""

    int4: dict[str, Any] = Field(default={}, exclude=True)
    """The INT4 weights by linear, as of :func:`read_int4`."""

    def compress_module_list(self, module_list: list[Linear]) -> None:
        """Quantise linears whose inputs were seen; those without an INT4 weight as llmcompressor does."""
        layers: dict[str, list[Linear]] = {}
        for module in module_list:
            if is_w8a8(module.quantization_scheme) and (name := self._module_names[module]) in self.int4:
                layers.setdefault(fused_name(name), []).append(module)
        observed = {m: m.weight_observer.get_statistics() for layer in layers.values() for m in layer}
        near = {module: found for layer in layers.values() for module, found in self._fit(layer).items()}
        schemes = {module: module.quantization_scheme for module in near}
        for module, (middle, widths) in near.items():
            for name, value in observed[module].items():  # which observers forget when scales are read
                is_end = name in ("min_vals", "max_vals")
                setattr(module.weight_observer, name, value * widths if is_end else value)
            in_4_bits = schemes[module].weights.model_copy(update={"num_bits": 4})
            module.quantization_scheme = schemes[module].model_copy(update={"weights": in_4_bits})
            _add(module, -middle)
        super().compress_module_list(module_list)
        for module, (middle, _) in near.items():
            module.quantization_scheme = schemes[module]
            _add(module, middle)

    def _fit(self, layer: list[Linear]) -> dict[Linear, tuple[Tensor, Tensor]]:
        """Return from where differences count [out, in], and by what scales of INT8 are multiplied [out, 1].

        The linears have the same inputs.
        """
        scales = {m: m.weight_observer.get_qparams()["scale"].float() for m in layer}

        def read() -> Iterator[tuple[Linear, Tensor, Tensor, Tensor]]:
            for module, scale8 in scales.items():
                weight8 = (module.weight.float() / scale8).cpu()
                int4: Int4Weight = self.int4[self._module_names[module]]
                for part in blocks(int4.shape):
                    yield module, weight8[part.start : part.stop], *int4.read(part)

        def in_64_bit() -> Iterator[tuple[Tensor, Tensor]]:
            for _, weight8, values, scale in read():
                yield weight8.double(), (values * scale).flatten(1).double()

        column = fit_column(in_64_bit, layer[0].weight.shape[1])
        rows: dict[Linear, list[tuple[Tensor, Tensor]]] = {module: [] for module in layer}
        for module, weight8, values, scale in read():
            rows[module].append(_fit_rows(weight8, values, scale, column))
        found = {}
        for module, parts in rows.items():
            middle, widths = (torch.cat(part).to(scales[module].device) for part in zip(*parts, strict=True))
            found[module] = middle * scales[module] * widths, widths
        return found


def _fit_rows(weight8: Tensor, values: Tensor, scale: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole numbers [rows, inputs] from which differences count, and widths of steps [rows, 1].

    Arguments are as of `fit_block`, with INT8 weights not rounded. The numbers are predictions, and of the
    weights that differences miss by most, which a merge stores whole, the weights themselves.
    """
    rounded, one = weight8.round().clamp(LEAST, LARGEST).to(torch.int8), torch.ones(len(weight8), 1)
    row, widths, _ = fit_block(rounded, one, values, scale, column)
    weight8 = weight8 / widths
    predicted = predict(values, scale, row, column).clamp_(-WHOLLY_IN_REACH, WHOLLY_IN_REACH)
    wanted = weight8 - predicted
    missed = (wanted - wanted.clamp(LOWEST, HIGHEST)).abs()
    whole = missed.topk(count_exceptions(missed.shape[1]), dim=1).indices
    nearest = weight8.round().clamp(-WHOLLY_IN_REACH, WHOLLY_IN_REACH)
    return predicted.scatter_(1, whole, nearest.gather(1, whole)), widths


def _add(module: Linear, change: Tensor) -> None:
    weight: Tensor = module.weight
    update_offload_parameter(module, "weight", (weight.float() + change).to(weight.dtype))
