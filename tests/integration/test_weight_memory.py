# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Bytes of weights: what a process holds for them, whatever kernel packed them."""

from __future__ import annotations

import json
import sys

import pytest
from vllm.platforms import current_platform

from tests import programs
from tests.integration.conftest import bytes_of_int4_group, generate

pytestmark = pytest.mark.engine

MIB = 1 << 20
OUTPUTS, INPUTS = 8192, 4096
LARGE_LAYERS = """
import ctypes, gc, json, os, sys
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from benchmarks.speed import kernels
from benchmarks.speed.synthetic import linear_tensors
from flexquant.serving.worker.weight_memory import WeightMemory

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def linear(scheme, outputs, inputs):
    tensors = linear_tensors(scheme, outputs, inputs, kernels.NAME)
    before = resident()
    layer, nbytes = kernels.build_layer(scheme, scheme, outputs, inputs, tensors)
    return nbytes, resident() - before

def lm_head(outputs, inputs):
    before = resident()
    with set_current_vllm_config(kernels.vllm_config()):
        layer = ParallelLMHead(outputs, inputs, params_dtype=torch.bfloat16)
        layer.weight.data.fill_(1)
        memory = WeightMemory({"head": layer})
        layer.quant_method.process_weights_after_loading(layer)
    return memory.nbytes()["head"], resident() - before

kernels.prepare_process()
outputs, inputs = map(int, sys.argv[1:])
schemes = ("bf16", "w8a8", "w4a16")
for scheme in schemes:
    linear(scheme, 64, 64)  # what kernels keep once in a process comes to be here
found = {scheme: linear(scheme, outputs, inputs) for scheme in schemes}
print(json.dumps(found | {"lm_head": lm_head(outputs, inputs)}))
"""


@pytest.fixture(scope="module")
def large_layers() -> dict[str, tuple[int, int]]:
    """Return the counted bytes, and those by which the process grew, of a large layer of each scheme."""
    if not current_platform.is_cpu():
        pytest.skip("on a GPU, kernels pack weights into parameters")
    command = [sys.executable, "-c", LARGE_LAYERS, OUTPUTS, INPUTS]
    done = programs.run(command, timeout=300, environment=programs.newcomers_environment())
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scheme, bits", [("bf16", 16), ("w8a8", 8), ("w4a16", 4), ("lm_head", 16)])
def test_counted_is_what_the_process_holds(large_layers, scheme, bits):
    counted, grown = large_layers[scheme]
    assert counted >= OUTPUTS * INPUTS * bits // 8
    assert counted == pytest.approx(grown, rel=0.1, abs=2 * MIB)


def test_variants_and_what_they_share(merged):
    """Each of 4 layers has 147456 weights, 1024 output channels, 2304 groups of 64 and two norms of 128."""
    (served,) = generate(merged, ["phase"], ["hello"], sampling={"max_tokens": 2}, max_model_len=256)
    header, sizes = served.header, served.header["weight_bytes"]
    weights, channels, groups, norms = (4 * count for count in (147456, 1024, 2304, 256))
    assert weights + 2 * channels < sizes["w8a8"] - 2 * norms <= weights + 12 * channels
    assert 0 <= sizes["w4a16"] - 2 * norms - weights / 2 - groups * bytes_of_int4_group() < 1024
    embedding_and_head, final_norm = 2 * 2 * 320 * 128, 2 * 128
    # They are held once as parameters; kernels that pack the head hold it once more.
    assert sizes["shared"] - final_norm in (embedding_and_head, 1.5 * embedding_and_head)
    assert header["weight_bytes_in_16_bit"] == 2 * (weights + norms) + sizes["shared"]
