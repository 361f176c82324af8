# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Convert tensors as GPTQModel and AutoGPTQ write them to the format of compressed-tensors.

In the GPTQ format a linear [out, in] with ``bits`` (4 or 8) a weight and groups of ``g`` inputs has

- ``qweight`` int32 [in * bits / 32, out]: unsigned values; a word holds neighbouring inputs of one output;
- ``qzeros`` int32 [in / g, out * bits / 32]: unsigned zero points; the older format stores them minus one;
- ``scales`` [in / g, out];
- ``g_idx`` int32 [in]: the group of each input; without it the inputs are in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.entrypoints.convert import Converter
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

Tensors = dict[str, torch.Tensor]
WITH_OFFSET, WITHOUT_OFFSET = "gptq", "gptq_v2"
"""Values of ``checkpoint_format``: zero points stored minus one, and zero points stored as they are."""


class GPTQConverter(Converter):
    """A converter for compressed-tensors' ``convert_checkpoint``; it keeps the value of every weight."""

    def __init__(self, section: JsonObject, ignore: Iterable[str], tensors: Iterable[str]) -> None:
        """Read ``section``, the ``quantization_config`` of a GPTQ checkpoint.

        ``ignore`` names the linears in 16 bit, ``tensors`` all tensors of the checkpoint. Raises
        :class:`FlexQuantError` for settings that compressed-tensors cannot hold.
        """
        self.bits: int = section.get("bits", 4)
        if self.bits not in (4, 8):
            raise FlexQuantError(f"the checkpoint has {self.bits} bits a weight; only 4 and 8 are converted")
        if section.get("dynamic"):
            raise FlexQuantError(
                "the checkpoint has other bits or groups for some layers ('dynamic' in its "
                "quantization_config), which are not converted; quantise the model with one setting"
            )
        form = section.get("checkpoint_format") or WITH_OFFSET
        if form not in (WITH_OFFSET, WITHOUT_OFFSET):
            raise FlexQuantError(
                f"the checkpoint has the checkpoint_format {form!r}; only '{WITH_OFFSET}' and "
                f"'{WITHOUT_OFFSET}' are converted: take the checkpoint that it was packed from"
            )
        self.group_size: int = section.get("group_size", 128)
        self.symmetric: bool = section.get("sym", True)
        self.offset = 1 if form == WITH_OFFSET else 0
        self.reordered: bool = section.get("desc_act", False)
        self.ignore = list(ignore)
        self.tensors = set(tensors)

    def get_dependencies(self, weight_name: str) -> set[str]:
        """Return the names of the tensors that are converted together with this one."""
        module, _, part = weight_name.rpartition(".")
        others = {f"{module}.{other}" for other in ("qzeros", "scales", "g_idx")}
        return others & self.tensors if part == "qweight" else set()

    def validate(self, tensors: Tensors) -> Tensors:
        """Return the tensors unchanged; newer releases of compressed-tensors pass them without values."""
        return tensors

    def process(self, tensors: Tensors) -> Tensors:
        """Return a file's tensors in the format of compressed-tensors.

        Raises FlexQuantError for a linear whose groups do not hold neighbouring inputs.
        """
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

    def update_config(self, config: QuantizationConfig | None) -> QuantizationConfig:
        """Return :meth:`create_config`'s result; newer releases of compressed-tensors call this instead."""
        return self.create_config()

    def _check_order(self, module: str, groups: torch.Tensor | None, inputs: int) -> None:
        in_order = torch.arange(inputs) // (self.group_size if self.group_size > 0 else inputs)
        if self.reordered if groups is None else not torch.equal(groups.cpu().long(), in_order):
            raise FlexQuantError(
                f"{module} was quantised with its inputs in another order (desc_act), which the kernels for "
                "compressed-tensors do not undo; take a checkpoint without desc_act"
            )

    def _linear(self, module: str, tensors: Tensors) -> Tensors:
        packed, zeros, scales = (tensors.pop(f"{module}.{p}").cpu() for p in ("qweight", "qzeros", "scales"))
        values = self._unpacked(packed.T).contiguous()  # [out, in]
        self._check_order(module, tensors.pop(f"{module}.g_idx", None), values.shape[1])
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
        """Unpack the unsigned values of int32 words along the last dimension, lowest bits first."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        words = torch.bitwise_right_shift(packed.unsqueeze(-1), shifts)
        return torch.bitwise_and(words, 2**self.bits - 1).flatten(-2)
