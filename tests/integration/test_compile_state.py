# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two plans of one name whose layers compute differently share no key of vLLM's compile caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

from flexquant.serving.plan_views import give_own_compile_state, shallow_copy


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Twice(nn.Module):
    """A model as vLLM compiles it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_name_and_digest_are_in_the_key_and_in_the_folders_name() -> None:
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE))
    with set_current_vllm_config(config):
        model: Any = Twice(vllm_config=config)
    assert not model.do_not_compile
    keys, folders = {config.compute_hash()}, set()
    for name, digest in (("w4a16", "0" * 64), ("w4a16", "1" * 64), ("w8a8", "0" * 64)):
        plan: Any = shallow_copy(model)
        give_own_compile_state(plan, name, digest, config)
        keys.add(plan.vllm_config.compute_hash())
        folders.add(plan._compile_tag)
    assert len(keys) == 4 and len(folders) == 3
