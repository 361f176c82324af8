# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hold an lm_head that is stored in 16 bit in INT8, with one scale a row and activations in 16 bit.

A decode step reads the whole head, however few sequences it has. The head is loaded as it is stored, and
rounded to nearest once all weights are loaded. Scales found by squared error, also weighted by the hidden
states, lost no less. Products are by vLLM's kernels for INT8 weights (Marlin and others), and on a CPU by
:mod:`flexquant.serving.kernels.cpu_weight_only`.

On a CPU a tied embedding looks its rows up in the same INT8 matrix. On a GPU, whose kernels permute weights,
it stays in 16 bit beside the head.
"""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.logger import init_logger

from flexquant.errors import FlexQuantError, said_by
from flexquant.serving.kernels.cpu_weight_only import CPUW8A16LinearKernel
from flexquant.serving.vllm_api import (
    CompressedTensorsWNA16,
    MPLinearKernel,
    ParallelLMHead,
    QuantizeMethodBase,
    VocabParallelEmbedding,
    get_pp_group,
)
from flexquant.serving.worker.weight_memory import IN_16_BIT, multiplied

ROWS = 1 << 13
"""Rows that are rounded at once."""

logger = init_logger("vllm.flexquant.head")


def hold_heads_in_int8(models: Iterable[nn.Module]) -> None:
    """Have ``models``, not loaded yet, hold unquantised lm_heads in INT8; raise without a kernel."""
    if not get_pp_group().is_last_rank:
        return
    for model in models:
        for head in multiplied(model):
            if isinstance(head.quant_method, IN_16_BIT):
                weight = head.get_parameter("weight")
                embeddings = (m for m in model.modules() if isinstance(m, VocabParallelEmbedding))
                tied = [module for module in embeddings if getattr(module, "weight", None) is weight]
                method = Int8HeadMethod(head, tied)
                for module in method.served:
                    module.quant_method = method
            elif not isinstance(head.quant_method, Int8HeadMethod):
                logger.info("FlexQuant leaves the lm_head quantised as the checkpoint stores it")


class Int8HeadMethod(QuantizeMethodBase):
    """Multiplies by a head in INT8; on a CPU, looks rows up in it too."""

    kernel: MPLinearKernel

    def __init__(self, head: VocabParallelEmbedding, tied: list[VocabParallelEmbedding]) -> None:
        """Choose vLLM's kernel for ``head``; ``tied`` are all modules with its weights, itself too."""
        self._head = head
        self._create_int8_weights(nn.Module(), "meta")
        in_rows = isinstance(self.kernel, CPUW8A16LinearKernel)
        self.served = tied if in_rows else [head]
        """The modules that this method computes for."""
        self._keeps_16_bit = not (in_rows or isinstance(head, ParallelLMHead))

    def _create_int8_weights(self, module: nn.Module, device: torch.device | str) -> None:
        """Create the parameters in ``module`` that vLLM's kernel for INT8 weights reads."""
        head = self._head
        scheme = CompressedTensorsWNA16(strategy="channel", num_bits=8, layer_name=head.prefix)
        try:
            with torch.device(device):
                scheme.create_weights(
                    module,
                    output_size=head.output_size,
                    input_size=head.input_size,
                    output_partition_sizes=head.output_partition_sizes,
                    input_size_per_partition=head.input_size_per_partition,
                    params_dtype=head.params_dtype,
                    weight_loader=head.weight_loader,
                )
        except ValueError as e:
            size = f"{head.input_size} inputs and {head.output_size} outputs"
            problem = f"no kernel holds the lm_head of {size} in INT8 here ({said_by(e)})"
            raise FlexQuantError(f"{problem}; have 'head: stored'") from e
        del module.weight_shape  # which vLLM does not read
        self.__dict__.setdefault("kernel", scheme.kernel)

    def create_weights(self, layer: nn.Module, *weight_args: object, **extra_weight_attrs: object) -> None:
        raise RuntimeError("the head's weights are created before this method is; this is a FlexQuant bug")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Round the loaded weights."""
        head = self._head
        if (weight := self.exchange_weights(layer)) is None:
            return
        for rows in torch.arange(len(weight)).split(ROWS):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            exact = weight[here].float()
            scale = (exact.abs().amax(1, keepdim=True) / 127).to(head.params_dtype)
            scale = torch.where(scale > 0, scale, 1.0)
            rounded = (exact / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
            packed = rounded.view(torch.uint8).bitwise_xor(128).view(torch.int32)
            head.get_parameter("weight_packed").data[here] = packed
            head.get_parameter("weight_scale").data[here] = scale
        self.kernel.process_weights_after_loading(head)

    def exchange_weights(self, layer: nn.Module) -> torch.Tensor | None:
        """Create INT8 weights; return those in 16 bit, kept for look-ups, or None for a tied embedding."""
        head = self._head
        if layer is not head:
            return None
        weight = head.get_parameter("weight").data
        self._create_int8_weights(head, weight.device)
        if not self._keeps_16_bit:
            for module in self.served:
                # Adapters and drafts ask for the dtype, the device and the width.
                module.weight = nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)
        return weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [..., rows] for ``x`` [..., inputs], in its dtype."""
        return self.kernel.apply_weights(self._head, x, bias)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., inputs] of the tokens ``input_`` [...]."""
        if isinstance(self.kernel, CPUW8A16LinearKernel):
            return self.kernel.rows(self._head, input_).to(self._head.params_dtype)
        return nn.functional.embedding(input_, self._head.get_parameter("weight"))
