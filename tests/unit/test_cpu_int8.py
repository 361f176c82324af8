# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The linear that stands in for oneDNN's on CPUs whose INT8 arithmetic saturates."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flexquant.serving.kernels.cpu_kernels import ExactCPUInt8LinearKernel, exact_int8_linear
from flexquant.serving.vllm_api import init_int8_linear_kernel
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
    found = exact_int8_linear(x, x_scale, weight, scale)
    torch.testing.assert_close(found, sums.float() * x_scale * scale, rtol=0, atol=0)


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


@pytest.mark.parametrize("is_channelwise", [True, False])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_static", [True, False])
def test_every_scheme_of_activations(is_static, is_symmetric, is_channelwise):
    """Two linears of one scale each are fused, where scales are not by channel."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(64, 128, (32, 64), generator=generator, dtype=torch.int8)  # sums of pairs overflow
    x = torch.rand(3, 64, generator=generator).bfloat16() * 4 - (2 if is_symmetric else 0.5)
    of_weights = torch.rand(32 if is_channelwise else 2, 1, generator=generator)
    values = {"weight": weight, "weight_scale": of_weights, "input_scale": None, "input_zero_point": None}
    if is_static:
        values["input_scale"] = torch.tensor([4 / 255])
        values["input_zero_point"] = None if is_symmetric else torch.tensor([-96], dtype=torch.int8)
    layer = torch.nn.Module()
    vars(layer)["logical_widths"] = [16, 16]
    for name, value in (*values.items(), ("azp_adj", None), ("bias", None)):
        given = None if value is None else torch.nn.Parameter(value, requires_grad=False)
        layer.register_parameter(name, given)
    scheme = {"is_channelwise": is_channelwise, "is_static_input_scheme": is_static}
    chosen = init_int8_linear_kernel(**scheme, input_symmetric=is_symmetric, module_name="linear")
    kernel = ExactCPUInt8LinearKernel(chosen.config, [*values, "azp_adj"])
    kernel.process_weights_after_loading(layer)
    by_row = of_weights if is_channelwise else of_weights.repeat_interleave(16, 0)
    expected = x.float() @ (weight * by_row).t()
    found = kernel.apply_weights(layer, x).float()
    rounded = 4 / 127 / 12**0.5 * (weight.float().norm(dim=1, keepdim=True) * by_row).t()
    assert ((found - expected).abs() <= 4 * rounded + expected.abs() / 128).all()


LARGEST_VALUES = """
import json, os, torch
from benchmarks.speed import kernels

kernels.prepare_process()
tensors = {"weight": torch.full((128, 128), 127, dtype=torch.int8), "weight_scale": torch.ones(128, 1)}
layer, _ = kernels.build_layer("w8a8", "w8a8", 128, 128, tensors)
out = layer(torch.full((1, 128), 127.0, dtype=torch.bfloat16))
print(json.dumps([out.min().item(), out.max().item(), os.environ["VLLM_DISABLED_KERNELS"].split(",")]))
"""


def test_w8a8_on_a_cpu_with_avx512_and_without_vnni():
    """oneDNN is told to pass over VNNI, where this CPU has it; PyTorch goes on to use what there is.

    What the user has disabled stays so beside the kernel that is replaced.
    """
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "VLLM_DISABLED_KERNELS": "MyLinearKernel"}
    environment = os.environ | variables
    done = programs.run([sys.executable, "-c", LARGEST_VALUES], timeout=300, environment=environment)
    *found, disabled = json.loads(done.stdout.splitlines()[-1])
    assert found == [pytest.approx(128 * 127 * 127, rel=2**-8)] * 2 and "MyLinearKernel" in disabled


def test_the_compiler_knows_its_result():
    x, weight = torch.zeros(3, 64, dtype=torch.int8), torch.zeros(16, 64, dtype=torch.int8)
    scales = torch.ones(3, 1), torch.ones(1, 16)
    torch.library.opcheck(torch.ops.flexquant.exact_int8_linear.default, (x, scales[0], weight, scales[1]))


BUSY_THREADS = """
import os, torch
from pathlib import Path
from flexquant.serving.kernels.cpu_loops import has_loops

def busy():
    stats = [file.read_text().rpartition(")")[2].split() for file in Path("/proc/self/task").glob("*/stat")]
    return sorted((int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") for stat in stats)

assert has_loops()
torch.set_num_threads(2)
weight, scale = torch.ones(64, 4096, 64, dtype=torch.int8), torch.ones(4096)
before = busy()[-2]
for _ in range(2000):
    torch.ops.flexquant_weight_only.multiply(torch.ones(1, 4096, dtype=torch.bfloat16), weight, scale)
    if busy()[-2] > before + 0.5:
        break
print(busy()[-2] > before + 0.5)
"""


@pytest.mark.full
def test_a_loop_takes_the_threads_that_pytorch_has():
    done = programs.run([sys.executable, "-c", BUSY_THREADS], timeout=300)
    assert done.stdout.splitlines()[-1] == "True"
