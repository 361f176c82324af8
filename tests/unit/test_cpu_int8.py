# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The linear that stands in for oneDNN's on CPUs whose INT8 arithmetic saturates."""

import pytest
import torch

from flexquant.cpu_int8 import _widened, exact_int8_linear


@pytest.mark.parametrize(
    "out_features, in_features",
    [(16, 64), (3072, 576), (9728, 896), (431, 4864)],
    ids=["small", "in one piece", "in five pieces", "one piece and a row"],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_sums_are_those_of_integers(tokens, out_features, in_features):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-64, 64, (tokens, in_features), generator=generator, dtype=torch.int8)
    weight = torch.randint(-25, 26, (out_features, in_features), generator=generator, dtype=torch.int8)
    x_scale = 2.0 ** torch.randint(-8, 8, (tokens, 1), generator=generator)
    scale = 2.0 ** torch.randint(-8, 8, (1, out_features), generator=generator)
    sums = x.long() @ weight.long().t()
    assert sums.abs().max() < 2**24  # so fp32 has no excuse
    torch.testing.assert_close(
        exact_int8_linear(x, x_scale, weight, scale), sums.float() * x_scale * scale, rtol=0, atol=0
    )


def test_the_largest_values_do_not_saturate():
    x = torch.full((2, 64), -128, dtype=torch.int8)
    weight = torch.full((16, 64), -128, dtype=torch.int8)
    ones = torch.ones(2, 1), torch.ones(1, 16)
    assert (exact_int8_linear(x, ones[0], weight, ones[1]) == 64 * 128 * 128).all()


def test_its_memory_serves_inside_and_outside_of_inference_mode():
    """vLLM's passes run in inference mode, and may be the first to need the memory."""
    _widened.cache_clear()
    x, weight = torch.ones(2, 64, dtype=torch.int8), torch.ones(16, 64, dtype=torch.int8)
    scales = torch.ones(2, 1), torch.ones(1, 16)
    with torch.inference_mode():
        assert (exact_int8_linear(x, scales[0], weight, scales[1]) == 64).all()
    assert (exact_int8_linear(x, scales[0], weight, scales[1]) == 64).all()


def test_the_compiler_knows_its_result():
    x, weight = torch.zeros(3, 64, dtype=torch.int8), torch.zeros(16, 64, dtype=torch.int8)
    scales = torch.ones(3, 1), torch.ones(1, 16)
    torch.library.opcheck(torch.ops.flexquant.exact_int8_linear.default, (x, scales[0], weight, scales[1]))
