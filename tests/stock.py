# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Load a checkpoint as vLLM does without FlexQuant, in this process and without an engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """Prepare this process, of a single rank, for models of vLLM; ``folder`` is for what it needs."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels

    provide_cpu_kernels()  # once for a process: what it sets stays
    settings = patch.dict(os.environ)  # a configuration of vLLM sets variables
    with settings, pytest.MonkeyPatch.context() as patches, set_current_vllm_config(VllmConfig()):
        patches.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's runner for CPUs does
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def refusal_of_stock(folder: Path) -> str | None:
    """Return what vLLM says when it loads a checkpoint, or which parameter it leaves unwritten.

    None: all is loaded. The scales of the KV cache need not be there.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    try:
        config = EngineArgs(str(folder), max_model_len=256, enforce_eager=True).create_engine_config()
        of_model, loader = config.model_config, get_model_loader(config.load_config)
        with set_current_vllm_config(config), set_default_torch_dtype(of_model.dtype):
            model = initialize_model(config)
            floats = {name: p.data for name, p in model.named_parameters() if p.is_floating_point()}
            expected = {name: tensor for name, tensor in floats.items() if ".attn." not in name}
            for tensor in expected.values():
                tensor.fill_(torch.nan)
            model.load_weights(loader.get_all_weights(of_model, model))
            if unwritten := [name for name, tensor in expected.items() if tensor.isnan().any()]:
                return f"unwritten: {unwritten[0]}"
            process_weights_after_loading(model, of_model, torch.device("cpu"))
    except Exception as e:  # a loader of vLLM can raise anything
        return f"{type(e).__name__}: {e}"
    return None
