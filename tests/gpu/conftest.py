# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compiled engines with CUDA graphs, and checkpoints whose variants answer differently.

    pytest tests/gpu

On an NVIDIA GPU of compute capability 8.0 or newer; without one, on software graphs, for vLLM's V2 runner in
a process of its own: ``TRITON_INTERPRET=1 pytest tests/gpu``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexquant.evaluation import engine as in_process

in_process.prepare_environment()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's kernels run in its interpreter; vLLM then takes them where V1 on a CPU has its own."""
if INTERPRETED:
    import triton.backends

    # Lets vLLM find a Triton for CPUs; as Triton's own driver for CPUs does, it says that it is not active.
    driver = SimpleNamespace(is_active=lambda: False)
    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))

import torch  # noqa: E402 - vLLM reads the environment above
from vllm import envs  # noqa: E402
from vllm.compilation import monitor  # noqa: E402

from flexquant.merge import merge_checkpoints  # noqa: E402
from tests.checkpoints import StateDict, make_checkpoint  # noqa: E402
from tests.integration.conftest import (  # noqa: E402
    SMALL_CACHE,
    Answers,
    answers,
    options_for,
    watch_engines,  # noqa: F401
)

ON_GPU = torch.cuda.is_available()
SIZES = [1, 2, 4, 8, 16, 24, 32, 64]
SEQUENCES = 20
"""Sequences between two sizes: decode passes of 17 to 20 are padded beyond the largest FULL decode graph."""
KV_CACHE_BYTES = 1 << 30
RUNNERS = {"V1": "0", "V2": "1"}
FOR_TEST_FULL = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY")
"""Graph modes of which FULL_AND_PIECEWISE, or an eager engine, runs everything."""
SMOKE_TEST = "test_every_replay_is_of_the_plan_that_the_trace_names[V2-FULL_AND_PIECEWISE-by-batch]"
"""The one test of the V2 runner that does not wait for test-full: Triton's interpreter is slow."""
RUNNERS_HERE = list(RUNNERS) if ON_GPU else ["V2" if INTERPRETED else "V1"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    # No worker begins the longest file here when the others have nothing left.
    items.sort(key=lambda i: 0 if folder not in i.path.parents else 1 + (i.path.stem != "test_replays"))
    here = [item for item in items if folder in item.path.parents]
    for item in here if not ON_GPU else []:
        parameters = getattr(item, "callspec", None)
        runner = parameters.params.get("runner", RUNNERS_HERE[0]) if parameters else RUNNERS_HERE[0]
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if parameters and parameters.params.get("mode") in FOR_TEST_FULL:
            item.add_marker(pytest.mark.full)
        if parameters and parameters.params.get("runner") == "V2" and item.name != SMOKE_TEST:
            item.add_marker(pytest.mark.full)
        if runner not in RUNNERS_HERE:
            item.add_marker(pytest.mark.skip(reason=f"{runner} runs in another process: see tests/README.md"))


@pytest.fixture(scope="module", autouse=True)
def graphs() -> Iterator[None]:
    """Provide CUDA graphs, in software where there is no GPU."""
    if ON_GPU:
        yield
        return
    from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
    from tests.gpu import software_graphs

    provide_cpu_kernels()
    with pytest.MonkeyPatch.context() as patch:
        # Code compiled for recording and other code must not find each other in the cache.
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        software_graphs.install(patch)
        yield


@contextmanager
def graph_engine(
    folder: Path, runner: str, mode: str | None, policy: str | None = None, **options: Any
) -> Iterator[Any]:
    """Yield an engine in this process; ``mode`` is the CUDA graph mode, compiled by vLLM, or None for eager.

    ``policy`` is for merged checkpoints.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = RUNNERS[runner]
    envs.disable_envs_cache()
    # The V1 runner, when it has captured, forbids captures in the whole process; the V2 runner does not ask.
    monitor.set_cudagraph_capturing_enabled(True)
    if mode is not None:
        options["compilation_config"] = {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
    if mode is not None and not ON_GPU:
        # Operators that a recorder sees, and none of the fusions that only CUDA has.
        fusions = dict.fromkeys(("fuse_norm_quant", "fuse_act_quant"), False)
        options["compilation_config"] |= {"mode": 3, "backend": "eager", "pass_config": fusions}
    if ON_GPU:
        # A fixed size, since the memory that vLLM finds free is no measure while other engines come and go.
        options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    else:
        options = SMALL_CACHE | options
        options.pop("attention_backend", None)
    limits = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": 256, "max_model_len": 512}
    options = {"enable_prefix_caching": False, **limits, **options}
    if folder.name == "apart":
        options["flexquant"] = {"allow_incompatible_kv": True, **options.get("flexquant", {})}
    options |= {"enforce_eager": mode is None, "dtype": "bfloat16"}
    with (
        options_for(policy, options) as flexquant,
        in_process.engine(folder, flexquant=flexquant, **options) as llm,
    ):
        yield llm


def generate(
    folder: Path,
    runner: str,
    mode: str | None,
    policy: str | None,
    *batches: list[Any],
    tokens=16,
    **options: Any,
) -> list[Answers]:
    """Return what an engine answers to the batches, each answer of so many tokens."""
    with graph_engine(folder, runner, mode, policy, **options) as llm:
        return [answers(llm, batch, max_tokens=tokens, ignore_eos=True) for batch in batches]


def flip_mlp(state: StateDict) -> StateDict:
    """Negate what the MLPs add, so that one variant's answers are far from the other's; K and V stay."""
    return {name: -t if name.endswith("down_proj.weight") else t for name, t in state.items()}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``w8a8``, ``w4a16`` and ``fp8`` of one random model, ``merged``, and ``apart``.

    ``apart`` merges ``w8a8`` with ``flipped``, a W4A16 variant that answers quite differently.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_layers": 4, "group_size": 128}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    for scheme in ("w8a8", "w4a16", "fp8"):
        make_checkpoint(folder / scheme, scheme=scheme, **shape)
    make_checkpoint(folder / "flipped", scheme="w4a16", transform=flip_mlp, **shape)
    merge_checkpoints({name: folder / name for name in ("w8a8", "w4a16", "fp8")}, folder / "merged")
    apart = {"w8a8": folder / "w8a8", "w4a16": folder / "flipped"}
    merge_checkpoints(apart, folder / "apart", allow_incompatible_kv=True)
    return folder
