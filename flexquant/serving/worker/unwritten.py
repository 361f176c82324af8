# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find parameters, and parts of fused ones, that no tensor of the checkpoint was loaded into.

vLLM makes parameters of uninitialised memory and loads Q, K and V, say, into parts of one. So a few numbers
of every row are marked before loading, with NaN or an integer, and what still has its marks afterwards was
never written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

NOT_LOADED = re.compile(
    r"(^|[._])(g_idx(_sort_indices)?|azp_adj|weight_shape|(input|q|k|v|prob)_((global_)?scale|zero_point))$"
)
"""Matches parameters that vLLM's schemes create and a checkpoint need not have."""
MARKED = 8
"""Numbers of a row that are marked; integers can have the mark's value by themselves."""


def mark(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Mark the parameters that a checkpoint has to have; those without memory are left out."""
    for name, parameter in parameters.items():
        for marked in _marked(name, parameter):
            marked.fill_(_mark_of(marked))


def unwritten(parameters: dict[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of the marked parameters that still have a row with its marks."""
    return [
        name
        for name, parameter in parameters.items()
        if any(bool(_has_mark(marked).all(-1).any()) for marked in _marked(name, parameter))
    ]


def _marked(name: str, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """Yield what is marked of a parameter, as rows [..., numbers].

    A kernel can pad experts in the end, so the first row of each half is looked at: those of w1 and w3.
    """
    data = parameter.detach()
    if data.is_meta or data.numel() == 0 or data.dtype is torch.bool or NOT_LOADED.search(name):
        return
    if data.ndim < 2:
        yield data.reshape(-1, 1)
    elif data.ndim == 2:
        yield data[:, :MARKED]
        yield data[:MARKED].T
    else:
        yield data[..., :: max(1, data.shape[-2] // 2), :MARKED]


def _mark_of(data: torch.Tensor) -> float | int:
    return torch.nan if data.is_floating_point() else torch.iinfo(data.dtype).max // 3


def _has_mark(marked: torch.Tensor) -> torch.Tensor:
    return marked.float().isnan() if marked.is_floating_point() else marked == _mark_of(marked)
