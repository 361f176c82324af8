# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A variant has the precision of its name, also W4A8 that is computed from the W4A16 weights.

W4A8's arithmetic, a checkpoint of one copy, and what is refused. On a CPU each variant is right beside
others, with AMD's zentorch and without it.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from torch import nn
from vllm import envs
from vllm.platforms import current_platform

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.serving.vllm_api import CompressedTensorsWNA16
from flexquant.serving.worker.w4a8 import find_kernels, int4_scheme, use_8bit_activations
from tests import programs
from tests.checkpoints import make_checkpoint, make_pair
from tests.conftest import rest_full
from tests.integration.conftest import answers, bytes_of_int4_group, distance, engine, generate, records_of
from tests.integration.test_serving_errors import flexquant, refusal
from tests.policies import rules

pytestmark = pytest.mark.engine

SHORT = ["short"]
HIDDEN, INTERMEDIATE, GROUP = 512, 1024, 64
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return a merged checkpoint that holds W4A16 alone, beside its source."""
    folder = tmp_path_factory.mktemp("single")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    source = make_checkpoint(folder / "w4a16", scheme="w4a16", **sizes)
    merge_checkpoints({"w4a16": source}, folder / "merged")
    return folder


class SingleCopy(NamedTuple):
    """What is left of an engine that serves ``single`` by ``single-copy``, which uses W4A16 and W4A8."""

    x: torch.Tensor
    """Inputs [tokens, in] of W4A8's DOWN."""
    outputs: torch.Tensor
    """Outputs [tokens, out] of W4A8's DOWN."""
    short: list[Any]
    """The answers to SHORT; a long prompt was answered after it."""
    int4_weights: int
    own_modules: set[str]
    """The kinds of W4A8's modules with parameters that are not W4A16's."""
    header: dict[str, Any]
    passes: list[dict[str, Any]]


def own_modules(model) -> set[str]:
    return {
        type(module).__name__
        for name, module in model.variants["w4a8"].named_modules()
        if module._parameters and module is not model.variants["w4a16"].get_submodule(name)
    }


def count_int4_weights(model) -> int:
    layers = model.variants["w4a16"].modules()
    return sum(layer.input_size * layer.output_size for layer in layers if int4_scheme(layer))


@pytest.fixture(scope="module")
def single_copy(single, tmp_path_factory) -> SingleCopy:
    trace = tmp_path_factory.mktemp("single_copy") / "trace.jsonl"
    x = torch.randn(5, INTERMEDIATE, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    with engine(single / "merged", "single-copy", flexquant={"trace": str(trace)}) as llm:
        (outputs,) = llm.apply_model(lambda model: model.variants["w4a8"].get_submodule(DOWN)(x)[0])
        (weights,) = llm.apply_model(count_int4_weights)
        (kinds,) = llm.apply_model(own_modules)
        short = answers(llm, SHORT)
        answers(llm, ["a prompt of more than thirty-two tokens, which are bytes here"])
    header, *passes = records_of(trace)
    return SingleCopy(x, outputs, short, weights, kinds, header, passes)


def dequantised(folder: Path) -> torch.Tensor:
    """Return the INT4 weights of DOWN [out, in] in fp64."""
    tensors = load_file(folder / "model.safetensors")
    shape = torch.Size(tensors[f"{DOWN}.weight_shape"].tolist())
    unpacked = unpack_from_int32(tensors[f"{DOWN}.weight_packed"], 4, shape)
    return unpacked.double() * tensors[f"{DOWN}.weight_scale"].double().repeat_interleave(GROUP, dim=1)


def test_a_layer_multiplies_dequantised_int4_weights_with_int8_activations(single, single_copy):
    weight = dequantised(single / "w4a16")
    x, outputs = single_copy.x.double(), single_copy.outputs.double()
    x_scale = x.abs().amax(dim=1, keepdim=True) / 127
    expected = (torch.round(x / x_scale) @ weight.t()) * x_scale
    assert torch.allclose(outputs, expected, rtol=2**-7, atol=1e-3 * expected.abs().max())
    assert not torch.allclose(outputs, x @ weight.t(), rtol=2**-7, atol=1e-3)


def test_one_copy_serves_small_passes_as_w4a16_and_large_ones_as_w4a8(single, single_copy):
    """All weights but embedding and lm_head take 4.5 bits and what W4A16's groups of 64 take."""
    plans = {(p["tokens"] <= 32, p["plan"]) for p in single_copy.passes}
    assert plans == {(True, "w4a16"), (False, "w4a8")}
    sizes, weights = single_copy.header["weight_bytes"], single_copy.int4_weights
    assert 8 * sizes["w4a8"] / weights == pytest.approx(4.5, abs=0.01)
    assert 8 * sizes["w4a16"] / weights == pytest.approx(4 + bytes_of_int4_group() / 8, abs=0.01)
    (stock,) = generate(single / "w4a16", None, SHORT)
    assert [single_copy.short] == stock.answers


def test_all_else_is_shared_with_the_source(single_copy):
    linears = {"QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear"}
    assert single_copy.own_modules == linears


@pytest.mark.full
def test_three_variants_from_two(tiny_merged):
    """Other activations change W4A16, but not much more than other weights do."""
    policies, prompts = ["w8a8", "w4a16", "w4a8", "phase", "phase-batch-w4a8"], ["a prompt", "another prompt"]
    served = generate(tiny_merged() / "merged", policies, prompts, sampling={"ignore_eos": True})
    w8a8, w4a16, w4a8, phase, in_batches = (found.answers[0] for found in served)
    assert 0 < distance(w4a8, w4a16) < distance(w8a8, w4a16)
    assert in_batches == phase


def refused(folder, work, source: str, activations: str) -> str:
    derive = f"derive: {{fast: {{from: {source}, activations: {activations}}}}}\n"
    (policy := work / "p.yaml").write_text(derive + rules("- use: fast"))
    return refusal(folder / "merged", **flexquant(policy=str(policy)))


def test_w4a8_cannot_come_from_other_weights(tiny_merged, tmp_path):
    message = refused(tiny_merged(), tmp_path, "w8a8", "int8")
    assert "derive.fast derives 'fast' from 'w8a8', which has no symmetric INT4 weights" in message


@pytest.mark.skipif(not current_platform.is_cpu(), reason="some GPUs have the kernel")
def test_device_without_a_kernel_is_refused_before_loading(tiny_merged, tmp_path):
    message = refused(tiny_merged(), tmp_path, "w4a16", "fp8")
    assert message.startswith("there is no kernel for INT4 weights with fp8 activations on this CPU")
    with pytest.raises(FlexQuantError):
        find_kernels("fp8")


def test_a_layer_that_vllm_runs_without_a_kernel_is_refused():
    """vLLM 0.33 builds INT4 layers so in its batch-invariant mode."""
    layer = nn.Module()
    layer.scheme = CompressedTensorsWNA16(strategy="group", num_bits=4, group_size=64)
    layer.scheme.kernel = None
    with pytest.raises(FlexQuantError, match="layer 'down_proj' cannot have int8 .*VLLM_BATCH_INVARIANT"):
        use_8bit_activations(nn.ModuleDict({"down_proj": layer}), "int8")


ZENTORCH = programs.ROOT / ".venv" / "zen"
OUTLIER, OTHERS = 300.0, 0.5
"""The largest input, and the scale of the others, which INT8 rounds to zero beside it."""
POLICY = "derive: {w4a8: {from: w4a16, activations: int8}}\n" + rules(
    "- {when: {phase: decode, batch_size: {max: 2}}, use: w4a16}",
    "- {when: {phase: decode}, use: w4a8}",
    "- use: w8a8",
)
SERVE = f"""
import json, sys
import torch
from flexquant.evaluation import engine
from flexquant.serving.worker.worker_extension import status_of

def outputs(model):
    x = torch.load(sys.argv[2])
    layers = {{name: variant.get_submodule("{DOWN}") for name, variant in model.variants.items()}}
    found = {{name: layer(x)[0].tolist() for name, layer in layers.items()}}
    return {{"outputs": found, "kernels": status_of(model)["kernels"]}}

options = {{"max_model_len": 128, "enforce_eager": sys.argv[4] == "eager"}}
with engine.engine(sys.argv[1], flexquant={{"policy": sys.argv[3]}}, **options) as llm:
    (found,) = llm.apply_model(outputs)
    found["answers"] = [output.outputs[0].text for output in llm.generate(["a", "b"], use_tqdm=False)]
    with open(sys.argv[5], "w") as file:
        json.dump(found, file)
"""


RUNS = ("eager", "compiled", "with zentorch")


class Served(NamedTuple):
    """What an engine says of a layer in three variants."""

    outputs: dict[str, torch.Tensor]
    """Variant -> outputs [tokens, out] in fp64."""
    kernels: dict[str, list[str]]
    """Variant -> class names of its kernels."""
    with_zentorch: bool


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    if not current_platform.is_cpu():
        pytest.skip("these kernels are those of CPUs")
    folder = tmp_path_factory.mktemp("precisions")
    pair = make_pair(folder, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)
    merge_checkpoints(pair, folder / "merged")
    x = torch.randn(3, INTERMEDIATE, generator=torch.Generator().manual_seed(0)).clamp(-2, 2) * OTHERS
    x[:, 7] = OUTLIER
    torch.save(x.bfloat16(), folder / "x.pt")
    (folder / "policy.yaml").write_text(POLICY)
    return folder


def has_zentorch() -> bool:
    cpu = Path("/proc/cpuinfo").read_text()
    return "AuthenticAMD" in cpu and "avx512" in cpu and ZENTORCH.is_dir()


def in_a_process(program: str, *arguments: object, work: Path, zentorch: bool, **variables: str) -> Any:
    """Return what a program writes into its last argument: vLLM's platform depends on what is installed."""
    environment, reply = programs.newcomers_environment() | variables, work / "reply.json"
    environment |= {"VLLM_CACHE_ROOT": str(work / "cache"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for known in ("modelinfos", "flexquant/loops"):  # all but trials, which a test reads
        if Path(envs.VLLM_CACHE_ROOT, known).is_dir():
            shutil.copytree(Path(envs.VLLM_CACHE_ROOT, known), work / "cache" / known, dirs_exist_ok=True)
    if zentorch:
        paths = filter(None, [str(ZENTORCH), environment.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    programs.run([sys.executable, "-c", program, *arguments, reply], timeout=400, environment=environment)
    return json.loads(reply.read_text())


@pytest.fixture(scope="module", params=rest_full(RUNS, "eager"))
def served(request, checkpoints) -> Served:
    zentorch = request.param == "with zentorch"
    if zentorch and not has_zentorch():
        pytest.skip("AMD's zentorch is for Zen 4 and later; 'make test' installs it there")
    files = [checkpoints / name for name in ("merged", "x.pt", "policy.yaml")]
    # Without these W4A16 kernels, the one of vLLM that computes W4A8 is left.
    disabled = "FlexQuantCPUInt4LinearKernel,TorchCPUInt4LinearKernel,CPUWNA16LinearKernel"
    variables = {"VLLM_DISABLED_KERNELS": disabled} if zentorch else {}
    found = in_a_process(SERVE, *files, request.param, work=checkpoints, zentorch=zentorch, **variables)
    assert len(found["answers"]) == 2
    outputs = {name: torch.tensor(rows).double() for name, rows in found["outputs"].items()}
    return Served(outputs, found["kernels"], zentorch)


@pytest.fixture(scope="module")
def weight(checkpoints) -> torch.Tensor:
    return dequantised(checkpoints / "w4a16")


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_w4a16_rounds_no_activations_and_w4a8_does(served, checkpoints, weight):
    x = torch.load(checkpoints / "x.pt").double()
    step = x.abs().amax(dim=1, keepdim=True) / 127
    exact, rounded = x @ weight.t(), (torch.round(x / step) * step) @ weight.t()
    assert apart(exact, rounded) > 0.02
    for name, near, far in (("w4a16", exact, rounded), ("w4a8", rounded, exact)):
        found = served.outputs[name]
        assert apart(found, near) < 0.01 < apart(found, far), name


def test_w4a8_is_a_stand_in_only_where_neither_zentorch_nor_amx_is(served):
    has_amx = torch.cpu._is_amx_tile_supported()
    kernel = "ZentorchW4A8LinearKernel" if served.with_zentorch else "AMXW4A8LinearKernel"
    expected = kernel if served.with_zentorch or has_amx else "TorchCPUW4A8LinearKernel"
    assert served.kernels["w4a8"] == [expected]


def test_what_a_trial_found_is_kept_and_served(served, checkpoints):
    """Layers of many weights are tried with one and two tokens, where there is a choice."""
    kept = [json.loads(file.read_text()) for file in checkpoints.glob("cache/flexquant/kernels/*.json")]
    of_w4a16 = [trial for trial in kept if trial["key"]["sizes"] == [1, 2]]
    has_choice = hasattr(torch.ops._C, "cpu_gemm_wna16")
    assert served.with_zentorch or bool(of_w4a16) == has_choice
    for trial in of_w4a16:
        assert list(trial["microseconds"]) == trial["key"]["kernels"]
        assert all(set(times) == {"1", "2"} for times in trial["microseconds"].values())
    if has_choice:
        chosen = {trial["chosen"].rpartition(":")[2] for trial in of_w4a16}
        small_layers = {"ZentorchW4A16LinearKernel", "CPUW4A16LinearKernel"}
        assert set(served.kernels["w4a16"]) <= chosen | small_layers
