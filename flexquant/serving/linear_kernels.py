# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which kernel a linear layer has, and the same in another kind."""

from __future__ import annotations

from typing import Any

from flexquant.serving.vllm_api import MPLinearKernel


def find_kernel(layer: Any) -> Any:
    """Return the kernel of a quantised layer; None in 16 bit, or for a scheme that has no kernel object."""
    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        return None
    return next((value for value in vars(scheme).values() if hasattr(type(value), "can_implement")), None)


def kernel_name(layer: Any) -> str:
    """Return the name of a linear layer's kernel, or of vLLM's method where there is none."""
    kernel = find_kernel(layer)
    return type(kernel).__name__ if kernel else f"{type(layer.quant_method).__name__} (16 bit)"


def remake(kernel: Any, kind: Any) -> Any:
    """Return a kernel of another kind for the same layer."""
    if isinstance(kernel, MPLinearKernel):
        return kind(kernel.config, kernel.w_q_name, kernel.w_s_name, kernel.w_zp_name)
    return kind(kernel.config, kernel.layer_param_names)
