# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a checkpoint did not write of a parameter is found after loading, whichever part of it that is."""

from __future__ import annotations

import pytest
import torch

from flexquant.serving.worker.weights import mark, unwritten

ROWS = slice(16, None)
PARTS = {
    "rows": ((32, 32), ROWS),
    "columns": ((32, 32), (slice(None), ROWS)),  # AWQ and GPTQ have a linear's outputs there
    "an expert": ((4, 32, 32), 3),
    "half of each expert": ((4, 32, 32), (slice(None), ROWS)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_never_written_is_found(part: str, dtype: torch.dtype) -> None:
    shape, place = PARTS[part]
    parameters = {"linear.weight": torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)}
    mark(parameters)
    (data,) = (parameter.data for parameter in parameters.values())
    left = data[place].clone()
    data.fill_(1)
    assert unwritten(parameters) == []
    data[place] = left
    assert unwritten(parameters) == ["linear.weight"]
