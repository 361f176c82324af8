# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How a linear computes by 8-bit weights that are not stored, from weights in INT4 or in 16 bit.

Weights in 16 bit are rounded with one scale an output: vLLM's operators that quantise a token's activations
quantise a weight's row. On a GPU each pass does so, into memory that all layers share. On a CPU vLLM keeps
16-bit weights in oneDNN's layout alone, so that the start makes a copy in INT8, for vLLM's kernel of W8A8.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from flexquant.checkpoint.nested import count_exceptions
from flexquant.errors import FlexQuantError
from flexquant.serving.kernels.layers import kernel_of_layer, linear_sizes
from flexquant.serving.vllm_api import (
    LinearBase,
    MPLinearKernel,
    QuantizeMethodBase,
    UnquantizedLinearMethod,
    init_int8_linear_kernel,
)
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker.one_copy.product import (
    CHANNEL_SCALE,
    COLUMN,
    DIFFERENCE,
    EXCEPTIONS,
    NESTED,
    PLACES,
    ROW,
    Product,
    register_operator,
)

FACTOR_BYTES = 8
"""Bytes of two float32 numbers for each output of a view: its scale, and the inverse."""
SUM_BYTES = 4
"""Bytes of the sum of a nested output's weights, where activations have zero points."""
MULTIPLE = 16
"""Inputs and outputs of which vLLM's product for GPUs takes multiples."""
ADVICE = (
    "Marlin's and Humming's are, for multiples of 128 inputs and 64 outputs: drop --linear-backend and the "
    "option 'kernels', or take 8-bit 'weights' out of the policy"
    if current_platform.is_cuda()
    else "set VLLM_DISABLED_KERNELS to the kernel's name, or take 8-bit 'weights' out of the policy"
)


class OneCopyMethod(QuantizeMethodBase):
    """Computes the outputs of a linear by 8-bit weights that are not stored."""

    kernel_name: str
    """For people."""
    _rotation: Callable[[Tensor], Tensor] | None = None
    """What inputs go through before they are multiplied; None: nothing."""

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        raise RuntimeError("the source creates the weights; this is a FlexQuant bug")

    def make_ready(self, layer: LinearBase) -> None:
        """Give ``layer`` what it needs beside its weights, once these are loaded."""

    def nbytes(self, layer: LinearBase) -> tuple[int, int]:
        """Return the bytes that ``layer`` writes weights to (shared), and its other bytes but parameters."""
        inputs, outputs = linear_sizes(layer)
        return inputs * outputs, 0

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., outputs] for ``x`` [..., inputs], in its dtype."""
        x = x if self._rotation is None else self._rotation(x)
        out = self.multiply(layer, x.reshape(-1, x.shape[-1]), bias)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @abstractmethod
    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return [tokens, outputs] for ``x`` [tokens, inputs], in its dtype."""


class Int4Method(OneCopyMethod):
    """Computes 8-bit weights from the INT4 weights of the linear itself."""

    source: LinearBase | None = None
    """The linear with the INT4 weights; None: the view itself."""
    _product: Product
    _relation = "from"

    def read(self, layer: LinearBase, where: str, precision: str = "int8") -> None:
        """Choose how to read the weights of ``layer``, whose kernel is known; ``where`` is for the message.

        ``precision``: int8 or fp8. Raises :class:`FlexQuantError` if the kernel's layout is not known.
        """
        kernel = kernel_of_layer(layer)
        assert isinstance(kernel, MPLinearKernel)
        its_name = type(kernel).__name__
        if (product := product_of(kernel, type(kernel), precision)) is None:
            inputs, outputs = kernel.config.partition_weight_shape
            layout = f"whose layout of {inputs} inputs and {outputs} outputs is not known"
            problem = f"{where}: 8-bit weights cannot be computed from those of {its_name}, {layout}"
            raise FlexQuantError(f"{problem}; {ADVICE}")
        if getattr(layer.quant_method, "output_transform", None) is not None:
            problem = f"{where}: 8-bit weights are not computed where outputs are rotated in each pass"
            raise FlexQuantError(f"{problem}; take 8-bit 'weights' out of the policy")
        self._rotation = getattr(layer.quant_method, "input_transform", None)
        self._product, self.kernel_name = product, f"{product.precision} {self._relation} {its_name}"

    def make_ready(self, layer: LinearBase) -> None:
        layer._buffers = {**layer._buffers, **self._product.prepare(layer)}

    def nbytes(self, layer: LinearBase) -> tuple[int, int]:
        return self._product.written_bytes, FACTOR_BYTES * linear_sizes(layer)[1]

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product.multiply(layer if self.source is None else self.source, layer._buffers, x, bias)


class NestedMethod(Int4Method):
    """Computes the outputs of a linear that stores what the INT4 weights of ``source`` lack for its own."""

    source: LinearBase
    _relation = "nested in"

    def __init__(self, source: LinearBase, symmetric: bool) -> None:
        """``symmetric``: activations, which else have a zero point for each token."""
        self.source, self._symmetric = source, symmetric

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        *_: Any,
        weight_loader: Callable[..., None],
        **__: Any,
    ) -> None:
        """Create parameters for what is stored; exceptions are those of all ranks' inputs."""
        inputs, outputs = input_size_per_partition, sum(output_partition_sizes)
        number = count_exceptions(input_size)
        of_outputs = {"output_dim": 0}
        parts: tuple[tuple[str, tuple[int, ...], torch.dtype, dict[str, int | bool]], ...] = (
            (DIFFERENCE, (outputs, inputs // 2), torch.uint8, {"output_dim": 0, "input_dim": 1}),
            (ROW, (outputs, 1), torch.float32, of_outputs),
            (CHANNEL_SCALE, (outputs, 1), torch.float32, of_outputs),
            (EXCEPTIONS, (outputs, number), torch.int8, of_outputs),
            (PLACES, (outputs, number), torch.uint16, of_outputs),
            (COLUMN, (inputs,), torch.float32, {"input_dim": 0, "ignore_warning": True}),
        )

        def load_column(parameter: nn.Parameter, loaded: Tensor, *shard: object) -> None:
            """Load the factors of one of the linears that vLLM fuses; raise FlexQuantError if they differ."""
            before = parameter.clone() if vars(parameter).get("is_loaded") else None
            weight_loader(parameter, loaded, *shard)
            vars(parameter)["is_loaded"] = True
            if before is not None and not torch.equal(before, parameter):
                problem = f"{getattr(layer, 'prefix', 'a linear')} is made of linears whose weight_column"
                problem += " differs, and vLLM multiplies them at once"
                raise FlexQuantError(f"{problem}; merge the checkpoint again")

        for name, shape, dtype, dimensions in parts:
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            vars(parameter).update(dimensions, weight_loader=load_column if name == COLUMN else weight_loader)
            layer.register_parameter(_parameter_name(name), parameter)
        layer.register_parameter("weight", None)  # as of kernels that keep weights under no name

    def nbytes(self, layer: LinearBase) -> tuple[int, int]:
        return super().nbytes(layer)[0], 0 if self._symmetric else SUM_BYTES * linear_sizes(layer)[1]

    def make_ready(self, layer: LinearBase) -> None:
        names = (CHANNEL_SCALE, ROW, *NESTED)
        nested = {name: layer.get_parameter(_parameter_name(name)).data for name in names}
        inputs = len(nested[COLUMN])
        places = nested[PLACES].int() - (0 if inputs == layer.input_size else layer.tp_rank * inputs)
        places[(places < 0) | (places >= inputs)] = -1  # inputs of other ranks
        nested |= {PLACES: places, **{name: nested[name].flatten() for name in (CHANNEL_SCALE, ROW)}}
        buffers = self._product.prepare(self.source, nested, self._symmetric)
        for name in (DIFFERENCE, PLACES, EXCEPTIONS):
            layer.register_parameter(_parameter_name(name), nn.Parameter(buffers[name], requires_grad=False))
        layer._buffers = {**layer._buffers, **buffers}


def _parameter_name(buffer: str) -> str:
    """Return the name of the parameter in which a nested linear's checkpoint stores a buffer."""
    return buffer.replace("flexquant", "weight")


def product_of(kernel: MPLinearKernel, kind: type[Any], precision: str = "int8") -> Product | None:
    """Return this device's product for weights that a kernel of ``kind`` keeps; None for unknown layouts."""
    if current_platform.is_cpu():
        from flexquant.serving.worker.one_copy.cpu import CPUInt8Product, layout_of

        of_cpu = layout_of(kind)
        return None if of_cpu is None else CPUInt8Product(kernel, of_cpu)
    from flexquant.serving.worker.one_copy.gpu import GPUProduct
    from flexquant.serving.worker.one_copy.gpu import layout_of as layout_on_gpu

    of_gpu = layout_on_gpu(kind, kernel.config)
    return None if of_gpu is None else GPUProduct(kernel, of_gpu, precision)


def is_rounded(layer: LinearBase) -> bool:
    """Whether a linear is in 16 bit, and of sizes that can be multiplied in 8 bit."""
    is_in_16_bit = isinstance(layer.quant_method, UnquantizedLinearMethod)
    return is_in_16_bit and not any(size % MULTIPLE for size in linear_sizes(layer))


def rounding_method(source: LinearBase, precision: str) -> OneCopyMethod:
    """Return the method of a view of ``source``, whose weights are not loaded; ``precision``: int8 or fp8."""
    if not current_platform.is_cpu():
        return RoundingMethod(precision)
    if not isinstance(source.quant_method, WithInt8Copy):
        source.quant_method = WithInt8Copy()
    return Int8CopyMethod(source.quant_method)


class RoundingMethod(OneCopyMethod):
    """Rounds the weights in each pass, on a GPU."""

    def __init__(self, precision: str) -> None:
        from flexquant.serving.worker.one_copy.gpu import FP8, eight_bit_type

        self._type = eight_bit_type(precision)
        self.kernel_name = f"{'FP8' if self._type == FP8 else 'INT8'} from 16 bit"

    def make_ready(self, layer: LinearBase) -> None:
        from flexquant.serving.worker.one_copy.gpu import scratch

        weight = layer.get_parameter("weight")
        scratch(weight.device, weight.numel(), self._type)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.flexquant.linear_from_16_bit(x, layer._parameters["weight"], bias, self._type)
        return out


class WithInt8Copy(UnquantizedLinearMethod):
    """Computes in 16 bit, as vLLM does on a CPU, and keeps a copy of the weights in INT8."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="FlexQuant"
        )
        self.copy = nn.Module()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight, scales, _ = ops.scaled_int8_quant(layer.get_parameter("weight").data)
        for name, value in (("weight", weight), ("weight_scale", scales)):
            self.copy.register_parameter(name, nn.Parameter(value, requires_grad=False))
        for name in ("input_scale", "input_zero_point", "azp_adj"):
            self.copy.register_parameter(name, None)
        vars(self.copy).update(logical_widths=[len(weight)], bias=getattr(layer, "bias", None))
        self.kernel.process_weights_after_loading(self.copy)
        super().process_weights_after_loading(layer)


class Int8CopyMethod(OneCopyMethod):
    """Multiplies by the copy in INT8 that the method of its source has made."""

    def __init__(self, source: WithInt8Copy) -> None:
        self._source = source
        self.kernel_name = f"{type(source.kernel).__name__} on a copy from 16 bit"

    def nbytes(self, layer: LinearBase) -> tuple[int, int]:
        inputs, outputs = linear_sizes(layer)
        return 0, (inputs + 4) * outputs

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = self._source.kernel.apply_weights(self._source.copy, x, bias)
        return out


def linear_from_16_bit(x: Tensor, weight: Tensor, bias: Tensor | None, precision: torch.dtype) -> Tensor:
    """Return [tokens, outputs] for ``x`` [tokens, inputs], quantised per token and multiplied in 8 bit."""
    from flexquant.serving.worker.one_copy.gpu import FP8, multiply_in_8_bit, scratch

    out = scratch(weight.device, weight.numel(), precision).view_as(weight)
    if precision == FP8:
        _, scales = ops.scaled_fp8_quant(weight, output=out, use_per_token_if_dynamic=True)
    else:
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        torch.ops._C.dynamic_scaled_int8_quant(out, weight, scales, None)
    return multiply_in_8_bit(x, out, scales[:, 0], bias)


register_operator(
    linear_from_16_bit, "CUDA", lambda x, weight, *_: x.new_empty((x.shape[0], weight.shape[0]))
)
