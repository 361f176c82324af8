# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The linear that stands in for oneDNN's on CPUs whose INT8 arithmetic saturates."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flexquant.serving.kernels.cpu_kernels import exact_int8_linear
from tests import programs

pytestmark = pytest.mark.oldest


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
    assert sums.abs().max() < 2**24  # fp32 computes such sums exactly
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
    x, weight = torch.ones(2, 64, dtype=torch.int8), torch.ones(16, 64, dtype=torch.int8)
    scales = torch.ones(2, 1), torch.ones(1, 16)

    def multiply() -> list[bool]:
        with torch.inference_mode():
            inside = exact_int8_linear(x, scales[0], weight, scales[1])
        outside = exact_int8_linear(x, scales[0], weight, scales[1])
        return [bool((out == 64).all()) for out in (inside, outside)]

    with ThreadPoolExecutor(1) as new_thread:  # the new thread has no memory yet
        assert new_thread.submit(multiply).result() == [True, True]


def test_threads_multiply_at_once():
    def multiply(value: int) -> bool:
        x, weight = torch.ones(1, 2048, dtype=torch.int8), torch.full((2048, 2048), value, dtype=torch.int8)
        scales = torch.ones(1, 1), torch.ones(1, 2048)
        outs = [exact_int8_linear(x, scales[0], weight, scales[1]) for _ in range(30)]
        return all(bool((out == 2048 * value).all()) for out in outs)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(multiply, range(4))) == [True] * 4


LARGEST_VALUES = """
import json, torch
from benchmarks.speed import kernels

kernels.prepare_process()
tensors = {"weight": torch.full((128, 128), 127, dtype=torch.int8), "weight_scale": torch.ones(128, 1)}
layer, _ = kernels.build_layer("w8a8", "w8a8", 128, 128, tensors)
out = layer(torch.full((1, 128), 127.0, dtype=torch.bfloat16))
print(json.dumps([out.min().item(), out.max().item()]))
"""


def test_w8a8_on_a_cpu_with_avx512_and_without_vnni():
    """oneDNN is told to pass over VNNI, where this CPU has it; PyTorch goes on to use what there is."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = programs.run([sys.executable, "-c", LARGEST_VALUES], timeout=300, environment=environment)
    assert json.loads(done.stdout.splitlines()[-1]) == [pytest.approx(128 * 127 * 127, rel=2**-8)] * 2


def test_the_compiler_knows_its_result():
    x, weight = torch.zeros(3, 64, dtype=torch.int8), torch.zeros(16, 64, dtype=torch.int8)
    scales = torch.ones(3, 1), torch.ones(1, 16)
    torch.library.opcheck(torch.ops.flexquant.exact_int8_linear.default, (x, scales[0], weight, scales[1]))
