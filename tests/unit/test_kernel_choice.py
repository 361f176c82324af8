# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How kernels are chosen: which are tried, with what sizes, what is kept, and what a failed trial does."""

import dataclasses
import json
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from vllm import _custom_ops  # noqa: F401 - loads torch.ops._C
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from flexquant.errors import FlexQuantError
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy, parse_policy
from flexquant.serving.kernels import choice, trial
from flexquant.serving.kernels.choice import choose_kernels, possible_kernels, sizes_by_variant
from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.layers import LinearKernel, kernel_of_layer
from flexquant.serving.kernels.trial import find_fastest
from flexquant.serving.vllm_api import HummingLinearKernel, MacheteLinearKernel, MarlinLinearKernel
from flexquant.serving.worker.one_copy import gpu

TORCH = f"{TorchCPUInt4LinearKernel.__module__}:{TorchCPUInt4LinearKernel.__name__}"
STOCK = "flexquant.serving.kernels.cpu_kernels:CPUW4A16LinearKernel"
LAYER = {"inputs": 256, "outputs": 128, "dtype": "bfloat16", "group_size": 64}
LAYER |= {"zero_points": False, "sizes": [1, 64]}
DECODES_FEW = """
schema: flexquant.policy/v1
rules:
  - when: {phase: decode, batch_size: {min: 3, max: 3}}
    use: w4a16
  - use: w8a8
"""


def sizes(policy: str) -> dict[str, tuple[int, ...]]:
    read = parse_policy(yaml.safe_load(policy), "test") if "\n" in policy else load_policy(policy)
    limits = {"num_layers": 2, "max_tokens": 2048, "max_decode_tokens": 128}
    return sizes_by_variant(build_route_table(read, ["w8a8", "w4a16"], **limits))


@pytest.mark.parametrize(
    "policy, expected",
    [
        ("w4a16", {"w4a16": (1, 2, 4, 8, 16, 32, 64)}),
        ("phase", {"w8a8": (64, 256), "w4a16": (1, 2, 4, 8, 16, 32, 64)}),
        ("phase-batch", {"w8a8": (64,), "w4a16": (1, 2, 4, 8, 16, 32)}),
        (DECODES_FEW, {"w8a8": (1, 2, 4, 8, 16, 32, 64), "w4a16": (3,)}),
    ],
)
def test_kernels_are_tried_with_the_sizes_that_the_policy_gives(policy, expected):
    assert sizes(policy) == expected


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path / "flexquant" / "kernels"


@pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_gemm_wna16"), reason="on this CPU there is one INT4 kernel"
)
@pytest.mark.full
@pytest.mark.parametrize("zero_points", [False, True])
def test_a_trial_times_real_kernels_and_is_made_once(cache, monkeypatch, zero_points):
    layer = {**LAYER, "zero_points": zero_points, "kernels": [STOCK, TORCH]}
    (chosen,) = find_fastest([layer])
    (file,) = cache.iterdir()
    found = json.loads(file.read_text())
    assert found["chosen"] == chosen
    timed = {name: sorted(times) for name, times in found["microseconds"].items()}
    assert timed == {STOCK: ["1", "64"], TORCH: ["1", "64"]}
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert find_fastest([layer, layer]) == [chosen, chosen]


def remember(cache: Path, layer: dict, **changes: object) -> Path:
    """Put a trial into the cache, as this machine would."""
    key = {**trial._circumstances(), **layer}
    file = cache / f"{trial.digest_of(key)[:32]}.json"
    cache.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": key, "chosen": TORCH, "microseconds": {}} | changes))
    return file


def test_a_trial_that_fails_leaves_vllms_first_kernel_and_nothing_behind(cache, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert find_fastest([{**LAYER, "kernels": [STOCK, TORCH]}]) == [STOCK] and not cache.exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", json.dumps({"key": {}, "chosen": TORCH}), "[" * 100_000, None, os.mkfifo],
    ids=["empty", "list", "nothing", "another key", "too deep", "another kernel", "a pipe"],
)
def test_what_is_no_trial_of_this_layer_is_not_believed(cache, monkeypatch, content):
    layer = {**LAYER, "kernels": [STOCK, TORCH]}
    file = remember(cache, layer, chosen="os:system")
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        file.unlink()
        content(file)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert find_fastest([layer]) == [STOCK]
    file.unlink()
    remember(cache, layer)
    assert find_fastest([layer]) == [TORCH]


def test_a_trial_is_made_though_nothing_can_be_kept(cache):
    cache.parent.write_text("no folder")
    assert find_fastest([{**LAYER, "kernels": ["flexquant:None", TORCH]}]) == [TORCH]


def test_the_first_kernel_is_kept_unless_another_is_clearly_faster():
    def times(*microseconds: float) -> dict[str, dict[str, float]]:
        return {name: {"1": t, "64": t} for name, t in zip((STOCK, TORCH), microseconds, strict=True)}

    assert trial._least(times(100, 96), STOCK) == STOCK and trial._least(times(100, 90), STOCK) == TORCH


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise OSError('undefined symbol: _ZN3c10')", "undefined symbol: _ZN3c10"),
        ("import a_module_that_nobody_has", "No module named 'a_module_that_nobody_has'"),
        ("", "it is for AMD CPUs with AVX512"),
    ],
    ids=["for another torch", "incomplete", "on another CPU"],
)
def test_a_zentorch_that_vllm_does_not_take_is_told_in_one_line(tmp_path, monkeypatch, code, reason):
    assert choice.zentorch_problem() is None
    metadata = tmp_path / "zentorch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: zentorch\nVersion: 9.9\n")
    (tmp_path / "zentorch.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "zentorch", raising=False)
    problem = choice.zentorch_problem()
    assert problem is not None and problem.startswith("zentorch 9.9 is installed and not used: ")
    assert reason in problem and "extra 'zen'" in problem and "\n" not in problem


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what has vLLM's kernels find a GPU of a compute capability, and Humming's package."""

    def pretend(capability: int) -> None:
        answers = {"is_cuda": True, "is_cpu": False}
        answers["get_device_capability"] = DeviceCapability(*divmod(capability, 10))
        for name, answer in answers.items():
            monkeypatch.setattr(type(current_platform), name, lambda *_, answer=answer: answer)
        for name in ("is_device_capability", "has_device_capability"):
            compare = operator.eq if name.startswith("is") else operator.le
            monkeypatch.setattr(type(current_platform), name, lambda _, c, *__, f=compare: f(c, capability))
        monkeypatch.setattr(f"{HummingLinearKernel.__module__}.has_humming", lambda: True)

    return pretend


def int4_kernel(**changes: object) -> LinearKernel:
    """Return a kernel for INT4 that a linear of 512 inputs and 256 outputs has."""
    layer = {"inputs": 512, "outputs": 256, "dtype": "bfloat16", "group_size": 128, **changes}
    found = kernel_of_layer(trial.new_layer(layer, TorchCPUInt4LinearKernel))
    assert found is not None
    return found


@pytest.mark.parametrize(("group", "read"), [(48, 0), (96, 0), (192, 0), (32, 1), (128, 1), (256, 1)])
def test_groups_that_the_kernel_of_one_copy_would_cut_are_not_read(monkeypatch, group, read):
    monkeypatch.setattr(gpu, "layout_found", lambda *_: gpu.HUMMING[0])
    found = gpu.layout_of(HummingLinearKernel, int4_kernel(inputs=group * 64, group_size=group).config)
    assert found == (gpu.HUMMING[0] if read else None)


def tried(kernel: LinearKernel) -> list[str]:
    return [kind.__name__.removesuffix("LinearKernel") for kind in possible_kernels(kernel)]


@pytest.mark.parametrize(
    ("capability", "own", "layer", "expected"),
    [
        (90, MacheteLinearKernel, {}, ["Machete", "Marlin", "Humming"]),
        (90, MacheteLinearKernel, {"zero_points": True}, ["Machete", "Marlin", "Humming"]),
        (90, MarlinLinearKernel, {"group_size": 32}, ["Marlin", "Humming"]),
        (80, MarlinLinearKernel, {}, ["Marlin", "Humming"]),
    ],
    ids=["Hopper", "zero points", "groups that Machete lacks", "Ampere"],
)
def test_a_gpu_tries_vllms_int4_kernels(on_gpu, monkeypatch, capability, own, layer, expected):
    kernel = int4_kernel(**layer)
    on_gpu(capability)
    kernel = own(kernel.config, kernel.w_q_name, kernel.w_s_name, kernel.w_zp_name)
    assert tried(kernel) == expected
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", f"{expected[1]}LinearKernel")
    assert tried(kernel) == [expected[0], *expected[2:]]
    config = VllmConfig()
    config.kernel_config.linear_backend = "marlin"
    with set_current_vllm_config(config):
        assert tried(kernel) == expected[:1]


@pytest.mark.parametrize(
    ("capability", "act_type", "group", "expected"),
    [
        (90, torch.float8_e4m3fn, 128, ["CutlassW4A8FP8", "HummingW4A8"]),
        (90, torch.float8_e4m3fn, 32, ["HummingW4A8"]),
        (90, torch.int8, 128, ["HummingW4A8", "MarlinW4A8"]),
        (89, torch.float8_e4m3fn, 128, ["HummingW4A8", "MarlinW4A8"]),
    ],
    ids=["Hopper, FP8", "groups that CUTLASS lacks", "Hopper, INT8", "Ada, FP8"],
)
def test_a_gpu_tries_what_multiplies_int4_by_8_bit(on_gpu, capability, act_type, group, expected):
    kernel = int4_kernel(group_size=group)
    on_gpu(capability)
    kernel.config = dataclasses.replace(kernel.config, act_type=act_type, out_type=torch.bfloat16)
    assert tried(kernel) == expected


def test_vllms_name_of_a_kernel_turns_off_what_holds_it_to_one_precision(monkeypatch):
    kernel = int4_kernel()
    before = tried(kernel)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CPUWNA16LinearKernel")
    assert tried(kernel) == [name for name in before if name != "CPUW4A16"] != []


class BrokenKernel(TorchCPUInt4LinearKernel):
    """Fails when it lays out weights, as one does whose programs cannot be compiled."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise RuntimeError("no compiler")


class OtherKernel(TorchCPUInt4LinearKernel):
    """The same under another name."""


def test_a_trial_takes_the_fastest_that_runs(cache, monkeypatch, caplog):
    """By this test's clock; what fails is named and left out."""
    seconds = {"TorchCPUInt4LinearKernel": 2e-6, "OtherKernel": 1e-6}
    clock = lambda layers, x: lambda: len(x) * seconds[type(kernel_of_layer(layers[0])).__name__]  # noqa: E731
    monkeypatch.setattr(trial, "timed_pass", clock)
    three = BrokenKernel, TorchCPUInt4LinearKernel, OtherKernel
    kinds = [f"{kind.__module__}:{kind.__name__}" for kind in three]
    found = trial.measure({**LAYER, "kernels": kinds})
    assert list(found) == kinds[1:] and trial._least(found, kinds[0]) == kinds[2]
    assert trial._least({}, kinds[0]) == kinds[0]
    assert "BrokenKernel" in caplog.text and "no compiler" in caplog.text


def test_of_two_trials_at_once_both_take_the_first_that_is_kept(cache):
    layer = {**LAYER, "kernels": [STOCK, TORCH]}
    key = {**trial._circumstances(), **layer}
    file = cache / f"{trial.digest_of(key)[:32]}.json"
    for chosen in (TORCH, STOCK):
        trial._write(file, {"key": key, "chosen": chosen, "microseconds": {}})
    assert find_fastest([layer]) == [TORCH] and [path.name for path in cache.iterdir()] == [file.name]


def test_a_kernel_can_be_named(cache):
    def model() -> torch.nn.Module:
        return torch.nn.ModuleList([trial.new_layer(LAYER, TorchCPUInt4LinearKernel)])

    named = model()
    choose_kernels({"w4a16": named}, {}, named={"w4a16": "Torch"})
    assert type(kernel_of_layer(named[0])) is TorchCPUInt4LinearKernel
    with pytest.raises(FlexQuantError, match="is 'humming' for 'w4a16', .* run on .*Torch"):
        choose_kernels({"w4a16": model()}, {}, named={"w4a16": "humming"})
