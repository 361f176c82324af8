# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Bytes of weights: what a process holds for them, whatever kernel packed them, as the doctor foretells."""

import json
import logging
import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform

from flexquant.doctor.examining import count_bytes
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import all_in
from flexquant.policy.rules import load_policy
from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel
from flexquant.serving.vllm_api import MPLinearLayerConfig, scalar_types
from flexquant.tuning.candidates import FROM_INT4
from tests import programs
from tests.checkpoints import make_pair
from tests.integration.conftest import bytes_of_int4_group, engine, generate
from tests.integration.live_server import flexquant_options
from tests.integration.test_doctor import findings
from tests.policies import DERIVE_INT8, rules

LARGE = {
    **{"num_layers": 6, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
}
"""SmolLM2-135M's sizes, apart from the number of layers."""
FOUR_TWICE = DERIVE_INT8 + rules(
    "- {when: {phase: decode}, use: w4a16}", '- use: {default: w8a8, layers: {"4-5": w8a8-from-int4}}'
)
NESTED_AND_ONE_COPY = DERIVE_INT8 + rules(
    "- {when: {phase: decode}, use: w4a16}", "- {when: {tokens: {max: 8}}, use: w8a8}", f"- use: {FROM_INT4}"
)
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


@pytest.mark.engine
@pytest.mark.parametrize("scheme, bits", [("bf16", 16), ("w8a8", 8), ("w4a16", 4), ("lm_head", 16)])
def test_counted_is_what_the_process_holds(large_layers, scheme, bits):
    counted, grown = large_layers[scheme]
    assert counted >= OUTPUTS * INPUTS * bits // 8
    assert counted == pytest.approx(grown, rel=0.1, abs=2 * MIB)


@pytest.mark.engine
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


def test_weights_are_those_of_the_checkpoint(merged):
    found = findings(merged)
    (weights,) = found["weights"]
    kernels = {
        s["kernel"] for f in found["kernel"] for s in f.details["shapes"] if f.details["variant"] == "w4a16"
    }
    # Where oneDNN has 16 bit, vLLM packs the head, and keeps it as it was too.
    twice = ["lm_head"] if current_platform.is_cpu() and torch.cpu._is_avx512_supported() else []
    if TorchCPUInt4LinearKernel.__name__ in kernels:  # it keeps zero points beside the scales
        twice.append("w4a16.*weight_scale")
    sizes = {"w8a8": 0, "w4a16": 0, "shared": 0}
    for shard in merged.glob("*.safetensors"):
        for key, tensor in load_file(shard).items():
            if not key.endswith("_shape"):
                copies = 2 if any(re.search(part, key) for part in twice) else 1
                sizes[key.partition(".")[0]] += tensor.nbytes * copies
    for name, size in sizes.items():
        assert weights.details["bytes"][name] == pytest.approx(size, rel=0.05), name
    assert list(weights.details["bytes_by_layers"]["shared"]) == [""], "attention's scales are not kept"
    (remark,) = found["lm_head"]
    assert "'head: int8' in the policy a step reads" in remark.text
    assert "lm_head" not in findings(merged, *flexquant_options(head="int8"))


def test_a_second_copy_of_int4_is_said(merged):
    """single-copy loads W4A16 and W4A8, the policy w4a8 W4A8 alone, and one copy has no second one."""
    said = "w4a8 is a second copy of w4a16's INT4 weights"
    for policy, twice in (("single-copy", True), ("w4a8", False), ("one-copy", False)):
        (weights,) = findings(merged, *flexquant_options(policy=policy))["weights"]
        sizes = weights.details["bytes"]
        assert (said in weights.text) == twice == ({"w4a8", "w4a16"} <= sizes.keys()), policy
        if twice:
            assert sizes["w4a8"] == pytest.approx(sizes["w4a16"], rel=0.1)


def test_the_memory_that_computed_weights_are_written_to_counts_once(tmp_path):
    """A pass computes one linear after another: gate_up_proj, of 512 x 128 weights, is the largest."""
    merge_checkpoints(make_pair(tmp_path, "qwen2"), tmp_path / "merged", nested="near")
    (file := tmp_path / "both.yaml").write_text(NESTED_AND_ONE_COPY)

    def sizes(policy):
        (weights,) = findings(tmp_path / "merged", *flexquant_options(policy=str(policy)))["weights"]
        assert set(weights.details["bytes"]) == set(weights.details["bytes_by_layers"])
        return weights.details["bytes"]

    nested, one_copy, both = map(sizes, ("w8a8", "one-copy", file))
    written = nested["w8a8"] - both["w8a8"]
    assert written == one_copy[FROM_INT4] - both[FROM_INT4] == both["shared"] - nested["shared"] == 512 * 128
    loaded = count_bytes(tmp_path / "merged", load_policy(str(file)).document, devices=1)
    plans = [all_in(name, 2) for name in ("w8a8", FROM_INT4, "w4a16")]
    assert loaded.of(plans) == sum(both.values())
    assert loaded.of(plans[:1]) == sum(nested.values())
    assert loaded.of(plans[1:]) - loaded.of(plans[2:]) == one_copy[FROM_INT4]


def test_scales_count_with_the_zero_points_that_pytorchs_kernel_keeps_beside_them(tmp_path, monkeypatch):
    """Scales of groups of 32 are an eighth of INT4 weights, so twice that is seen."""
    if not current_platform.is_cpu():
        pytest.skip("PyTorch's INT4 kernel is for CPUs")
    merge_checkpoints(make_pair(tmp_path, group_size=32), tmp_path / "merged")
    others = "CPUW4A16LinearKernel,ZentorchW4A16LinearKernel,FlexQuantCPUInt4LinearKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", others)
    found = findings(tmp_path / "merged")
    layouts = 0
    for finding in found["kernel"]:
        for shape in finding.details["shapes"] if finding.details["variant"] == "w4a16" else []:
            assert shape["kernel"] == TorchCPUInt4LinearKernel.__name__
            layouts += shape["layers"] * laid_out(shape["inputs"], shape["outputs"])
    (held,) = (f.details["bytes_by_layers"]["w4a16"]["0-1"] for f in found["weights"])
    assert layouts == pytest.approx(held, rel=0.01) and layouts > 0, "norms and shapes are hardly anything"


def laid_out(inputs: int, outputs: int) -> int:
    """Return the bytes of a linear layer in groups of 32 after PyTorch's INT4 kernel laid it out."""
    layer, sizes = torch.nn.Module(), (inputs, outputs)
    config = MPLinearLayerConfig(sizes, sizes, scalar_types.uint4b8, torch.bfloat16, 32, zero_points=False)
    kernel = TorchCPUInt4LinearKernel(config, "packed", "scale")
    for name, width, dtype in (("packed", 8, torch.int32), ("scale", 32, torch.bfloat16)):
        weight = torch.zeros(outputs, inputs // width, dtype=dtype)
        layer.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    kernel.process_weights_after_loading(layer)
    return sum(parameter.nbytes for parameter in layer.parameters())


@pytest.mark.engine
def test_weights_are_those_of_the_servers_log(tmp_path, caplog):
    """The model is tied and has a large vocabulary, four layers in two variants, and two in one."""
    merge_checkpoints(make_pair(tmp_path, **LARGE), tmp_path / "merged")
    (policy := tmp_path / "policy.yaml").write_text(FOUR_TWICE)
    (weights,) = findings(tmp_path / "merged", *flexquant_options(policy=str(policy)))["weights"]
    logger = logging.getLogger("vllm.flexquant.model")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)
    try:
        with engine(tmp_path / "merged", str(policy), max_model_len=256):
            pass
    finally:
        logger.removeHandler(caplog.handler)
    # The record comes twice where another test has had vLLM's records handed on to pytest.
    (announced,) = {r.getMessage() for r in caplog.records if " of 16-bit" in r.getMessage()}
    foretold, logged = mebibytes(weights.text), mebibytes(announced)
    assert list(foretold) == ["w8a8 layers 0-3", "w4a16 layers 0-5", "w8a8-from-int4", "shared"]
    assert list(foretold) == list(logged) and foretold == pytest.approx(logged, rel=0.05)


def mebibytes(text: str) -> dict[str, float]:
    """Return the MiB in a text, keyed by variant and layers."""
    found = re.findall(r"([\w-]+(?: layers [\d-]+)?): ([\d.]+) MiB", text)
    return {name: float(size) for name, size in found}
