# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""On a CPU a variant has the precision of its name, beside others, with AMD's zentorch and without it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from vllm.platforms import current_platform

from flexquant.merge import merge_checkpoints
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.policies import rules

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="these kernels are those of CPUs"),
]

ZENTORCH = programs.ROOT / ".venv" / "zen"
HIDDEN, INTERMEDIATE, GROUP = 512, 1024, 64
LAYER = "model.layers.0.mlp.down_proj"
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
    layers = {{name: variant.get_submodule("{LAYER}") for name, variant in model.variants.items()}}
    found = {{name: layer(x)[0].tolist() for name, layer in layers.items()}}
    return {{"outputs": found, "kernels": status_of(model)["kernels"]}}

options = {{"max_model_len": 128, "enforce_eager": sys.argv[4] == "eager"}}
with engine.engine(sys.argv[1], flexquant={{"policy": sys.argv[3]}}, **options) as llm:
    (found,) = llm.apply_model(outputs)
    found["answers"] = [output.outputs[0].text for output in llm.generate(["a", "b"], use_tqdm=False)]
    with open(sys.argv[5], "w") as file:
        json.dump(found, file)
"""


class Served(NamedTuple):
    """What an engine says of a layer in three variants."""

    outputs: dict[str, torch.Tensor]
    """Variant -> outputs [tokens, out] in fp64."""
    kernels: dict[str, list[str]]
    """Variant -> class names of its kernels."""
    with_zentorch: bool


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("precisions")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    sources = {name: make_checkpoint(folder / name, scheme=name, **sizes) for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, folder / "merged")
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
    if zentorch:
        paths = filter(None, [str(ZENTORCH), environment.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", program, *arguments, reply]
    programs.run(command, timeout=400, environment=environment)
    return json.loads(reply.read_text())


@pytest.fixture(
    scope="module", params=["eager", pytest.param("compiled", marks=pytest.mark.full), "with zentorch"]
)
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
    """Return the INT4 weights, dequantised [out, in]."""
    tensors = load_file(checkpoints / "w4a16" / "model.safetensors")
    shape = torch.Size(tensors[f"{LAYER}.weight_shape"].tolist())
    unpacked = unpack_from_int32(tensors[f"{LAYER}.weight_packed"], 4, shape)
    return unpacked.double() * tensors[f"{LAYER}.weight_scale"].double().repeat_interleave(GROUP, dim=1)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_w4a16_rounds_no_activations_and_w4a8_does(served, checkpoints, weight):
    x = torch.load(checkpoints / "x.pt").double()
    step = x.abs().amax(dim=1, keepdim=True) / 127
    exact, rounded = x @ weight.t(), (torch.round(x / step) * step) @ weight.t()
    assert distance(exact, rounded) > 0.02
    for name, near, far in (("w4a16", exact, rounded), ("w4a8", rounded, exact)):
        found = served.outputs[name]
        assert distance(found, near) < 0.01 < distance(found, far), name


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
