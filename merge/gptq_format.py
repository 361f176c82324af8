# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Tensors as GPTQModel and AutoGPTQ write them, made those of compressed-tensors.

A linear [out, in] of ``bits`` (4 or 8) in groups of ``g`` has there

- ``qweight`` int32 [in * bits / 32, out]: unsigned values, those of a column word by word;
- ``qzeros`` int32 [in / g, out * bits / 32]: unsigned zero points, less one in the older format;
- ``scales`` [in / g, out];
- ``g_idx`` int32 [in]: each input's group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)

from flexquant.errors import FlexQuantError

Tensors = dict[str, torch.Tensor]
PARTS = ("qzeros", "scales", "g_idx")
WITHOUT_OFFSET = "gptq_v2"
"""``checkpoint_format`` of the files whose zero points are stored as they are."""


class GPTQConverter:
    """A converter for compressed-tensors' ``convert_checkpoint``, which keeps the value of every weight."""

    def __init__(self, section: Mapping[str, Any], ignore: Iterable[str]) -> None:
        """Read the ``quantization_config`` of a GPTQ checkpoint; ``ignore`` names the linears in 16 bit.

        Raises :class:`FlexQuantError` for what compressed-tensors cannot hold.
        """
        self.bits: int = section.get("bits", 4)
        if self.bits not in (4, 8):
            raise FlexQuantError(f"the checkpoint has {self.bits} bits a weight; only 4 and 8 are converted")
        if section.get("dynamic"):
            raise FlexQuantError(
                "the checkpoint has other bits or groups for some layers ('dynamic' in its "
                "quantization_config), which are not converted; quantise the model with one setting"
            )
        self.group_size: int = section.get("group_size", 128)
        self.symmetric: bool = section.get("sym", True)
        self.offset = 0 if section.get("checkpoint_format") == WITHOUT_OFFSET else 1
        self.ignore = list(ignore)

    def get_dependencies(self, weight_name: str) -> set[str]:
        """Return the tensors that are converted together with one."""
        module, _, part = weight_name.rpartition(".")
        return {f"{module}.{other}" for other in PARTS} if part == "qweight" else set()

    def validate(self, tensors: Tensors) -> None:
        """Raise FlexQuantError for a linear whose inputs are in the groups of another order."""
        for key, tensor in tensors.items():
            if key.endswith(".qweight"):
                module = key.removesuffix(".qweight")
                self._check_order(module, tensors[f"{module}.g_idx"], tensor.shape[0] * 32 // self.bits)

    def process(self, tensors: Tensors) -> Tensors:
        """Return a file's tensors in the format of compressed-tensors."""
        for key in [key for key in tensors if key.endswith(".qweight")]:
            tensors |= self._linear(key.removesuffix(".qweight"), tensors)
        return tensors

    def create_config(self) -> QuantizationConfig:
        """Return the ``quantization_config`` of the converted checkpoint."""
        weights = QuantizationArgs(
            num_bits=self.bits,
            symmetric=self.symmetric,
            group_size=self.group_size if self.group_size > 0 else None,
            strategy=QuantizationStrategy.GROUP if self.group_size > 0 else QuantizationStrategy.CHANNEL,
        )
        form = CompressionFormat.pack_quantized.value
        return QuantizationConfig(
            config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights, format=form)},
            ignore=self.ignore,
            format=form,
            quantization_status=QuantizationStatus.COMPRESSED.value,
        )

    def _check_order(self, module: str, groups: torch.Tensor, inputs: int) -> None:
        size = self.group_size if self.group_size > 0 else inputs
        if not torch.equal(groups.long(), torch.arange(inputs) // size):
            raise FlexQuantError(
                f"{module} was quantised with its inputs in another order (desc_act), which the kernels for "
                "compressed-tensors do not undo; take a checkpoint without desc_act"
            )

    def _linear(self, module: str, tensors: Tensors) -> Tensors:
        packed, zeros, scales, _ = (tensors.pop(f"{module}.{part}") for part in ("qweight", *PARTS))
        values = self._unpacked(packed.T).contiguous()  # [out, in]
        zero_points = (self._unpacked(zeros) + self.offset) % 2**self.bits  # [in / g, out]
        middle = 2 ** (self.bits - 1)
        converted = {
            "weight_packed": pack_to_int32((values - middle).to(torch.int8), self.bits),
            "weight_scale": scales.T.contiguous(),
            "weight_shape": torch.tensor(values.shape),
        }
        if self.symmetric:
            if not bool((zero_points == middle).all()):
                raise FlexQuantError(
                    f"{module} has zero points beside {middle}, though its quantization_config says 'sym'; "
                    "get the checkpoint again"
                )
        else:
            signed = (zero_points.T - middle).to(torch.int8).contiguous()
            converted["weight_zero_point"] = pack_to_int32(signed, self.bits, packed_dim=0).contiguous()
        return {f"{module}.{part}": tensor for part, tensor in converted.items()}

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the unsigned values of int32 words, in order along the last dimension."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        words = torch.bitwise_right_shift(packed.unsqueeze(-1), shifts)
        return torch.bitwise_and(words, 2**self.bits - 1).flatten(-2)
