# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two plans of one name whose layers compute differently share no key of vLLM's compile caches.

And on a CPU, where FlexQuant leaves compiled code to Inductor's cache, no code either.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant
from flexquant.policy.plans import Plan
from flexquant.serving.config import find_compiled_code_again
from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.trial import new_layer
from flexquant.serving.worker.one_copy.methods import NestedMethod
from flexquant.serving.worker.plan_views import build_plan, give_own_compile_state, shallow_copy


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class Shift(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor + x


@support_torch_compile(dynamic_arg_dims={"x": 0})
class OneLayer(nn.Module):
    """A model as vLLM compiles it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.layer = Scale(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def compiled_model() -> tuple[Any, VllmConfig]:
    compilation = CompilationConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE, backend="inductor")
    config = VllmConfig(compilation_config=compilation)
    with set_current_vllm_config(config):
        model: Any = OneLayer(vllm_config=config)
    assert not model.do_not_compile
    return model, config


def test_name_and_digest_are_in_the_key_and_in_the_folders_name() -> None:
    model, config = compiled_model()
    keys, folders = {config.compute_hash()}, set()
    for name, digest in (("w4a16", "0" * 64), ("w4a16", "1" * 64), ("w8a8", "0" * 64)):
        plan: Any = shallow_copy(model)
        give_own_compile_state(plan, name, digest, config)
        keys.add(plan.vllm_config.compute_hash())
        folders.add(plan._compile_tag)
    assert len(keys) == 4 and len(folders) == 3


class OtherKernel(TorchCPUInt4LinearKernel):
    """The same under another name."""


def test_the_kernel_of_a_linear_is_in_the_key() -> None:
    """vLLM looks for compiled code by this key before it traces."""

    def key(kind: type = TorchCPUInt4LinearKernel, method: Any = None) -> str:
        model, _ = compiled_model()
        linear = new_layer({"inputs": 64, "outputs": 64, "dtype": "bfloat16", "group_size": 32}, kind)
        linear.quant_method = method or linear.quant_method
        model.layers, variant = nn.ModuleList([linear]), nn.Module()
        variant.model = model
        scheme = StoredVariant("w4a16.", {}, own_head=True, negative_scales=False)
        merged = MergedConfig("LlamaForCausalLM", {"w4a16": scheme})
        plan = build_plan({"w4a16": variant}, Plan.from_layers(("w4a16",)), merged, {})
        return plan.model.vllm_config.compute_hash()

    def nested_in(name: str) -> NestedMethod:
        method = NestedMethod(nn.Module(), symmetric=True)
        method.kernel_name = f"INT8 nested in {name}"
        return method

    keys = [key(), key(OtherKernel), *(key(method=nested_in(name)) for name in ("Marlin", "Humming"))]
    assert len(set(keys)) == 4 and key() == keys[0]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU's compiled code is kept by vLLM")
def test_on_a_cpu_plans_share_no_code_and_the_next_start_finds_theirs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "")
    monkeypatch.delenv("VLLM_USE_AOT_COMPILE")
    find_compiled_code_again()

    def start() -> list[int]:
        """Run two plans in turn at two sizes; count how often Inductor found their code and how often not."""
        before = dict(counters["inductor"])
        model, config = compiled_model()
        plans: list[Any] = []
        for name, layer in (("scales", Scale(3.0)), ("shifts", Shift(10.0))):
            plans.append(shallow_copy(model, layer=layer))
            give_own_compile_state(plans[-1], name, "0" * 64, config)
        with torch.inference_mode(), set_current_vllm_config(config):
            for size in (4, 7, 4):
                x = torch.arange(float(size))
                assert [plan(x).tolist() for plan in plans] == [(3 * x).tolist(), (10 + x).tolist()]
        names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
        return [counters["inductor"][name] - before.get(name, 0) for name in names]

    assert start() == [0, 2]
    torch._dynamo.reset()
    assert start() == [2, 0]
