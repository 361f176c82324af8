# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find which of vLLM's kernels runs each shape of linear layer and the experts, and why not a better one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from flexquant.doctor.findings import Finding
from flexquant.serving.kernels.cpu_kernels import REPLACED
from flexquant.serving.kernels.layers import (
    LinearKernel,
    expert_layers,
    experts_kernel_name,
    kernel_name,
    kernel_of_layer,
    linear_sizes,
)
from flexquant.serving.vllm_api import (
    _POSSIBLE_FP8_KERNELS,
    _POSSIBLE_INT8_KERNELS,
    _POSSIBLE_KERNELS,
    LinearBase,
    MPLinearKernel,
    is_supported_and_can_implement_kernel,
)


@dataclass
class LayerGroup:
    """Linear layers of one name, shape and kernel."""

    name: str
    inputs: int
    outputs: int
    """Outputs on one rank; ``inputs`` are also those of one rank."""
    kernel: str
    better: dict[str, str]
    """Kernel that vLLM prefers to this one -> reason why vLLM did not take it."""
    layers: int = 0


def find_kernels(variant: str, model: nn.Module) -> Iterator[Finding]:
    """Yield a finding for each kernel of a variant that is built without weights."""
    shapes: dict[tuple[str, int, int, str], LayerGroup] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            kernel, chosen = kernel_of_layer(layer), kernel_name(layer)
            key = (name.rsplit(".", 1)[-1], *linear_sizes(layer), chosen)
            if key not in shapes:
                shapes[key] = LayerGroup(*key, better=_better(kernel) if kernel else {})
            shapes[key].layers += 1
    for chosen in dict.fromkeys(shape.kernel for shape in shapes.values()):
        with_it = [shape for shape in shapes.values() if shape.kernel == chosen]
        which = ", ".join(f"{s.name} {s.inputs}x{s.outputs}" for s in with_it)
        reasons = {name: why for shape in with_it for name, why in shape.better.items()}
        rather = "".join(f"; not {name}: {why}" for name, why in reasons.items())
        yield Finding(
            "note" if reasons else "ok",
            "kernel",
            f"{variant}: {chosen} for {which}{rather}",
            {"variant": variant, "kernel": chosen, "shapes": [vars(shape) for shape in with_it]},
        )
    yield from _find_experts_kernels(variant, model)


def _find_experts_kernels(variant: str, model: nn.Module) -> Iterator[Finding]:
    names = Counter(experts_kernel_name(layer) for layer in expert_layers(model))
    for name, layers in names.items():
        yield Finding(
            "ok",
            "kernel",
            f"{variant}: {name} for the experts of {layers} layers",
            {"variant": variant, "kernel": name, "expert_layers": layers},
        )


def _better(kernel: LinearKernel) -> dict[str, str]:
    """Return the kernels that vLLM tries before this one on this device, and why it does not take them."""
    from vllm.platforms import current_platform

    here = current_platform._enum
    registers: list[Sequence[type[LinearKernel]]] = [
        _POSSIBLE_KERNELS.get(here, []),
        _POSSIBLE_INT8_KERNELS.get(here, []),
        _POSSIBLE_FP8_KERNELS.get(here, []),
    ]
    for candidates in registers:
        if type(kernel) in candidates:
            before = candidates[: candidates.index(type(kernel))]
            reasons = {candidate.__name__: _why_not(candidate, kernel) for candidate in before}
            return {name: why for name, why in reasons.items() if why}
    return {}


def _why_not(candidate: type[LinearKernel], kernel: LinearKernel) -> str:
    """Return why vLLM does not take a kernel; empty if it could, but the user or policy asked for another."""
    from vllm.platforms import current_platform

    name = candidate.__name__
    if name in REPLACED:
        return "FlexQuant replaces it on this CPU, see flexquant/serving/kernels/cpu_kernels.py"
    if not issubclass(candidate, MPLinearKernel):
        assert not isinstance(kernel, MPLinearKernel)
        said = is_supported_and_can_implement_kernel(candidate, kernel.config, None)[1]
        return said.strip(" .").removeprefix(f"{name} ")
    capability = current_platform.get_device_capability()
    if capability is not None and candidate.get_min_capability() > capability.to_int():
        return f"it needs compute capability {candidate.get_min_capability() / 10}"
    return (candidate.can_implement(kernel.config)[1] or "").strip(" .")
