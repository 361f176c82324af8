# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Engines for the tests: vLLM in this process, on a CPU if there is no GPU, eager.

An engine takes seconds to load, so tests that can share one ask for it through ``generate``, which keeps the
answers and not the engine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexquant.evaluation import engine as in_process

in_process.prepare_environment()
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM  # noqa: E402 - reads the environment above

from flexquant.compat import provide_cpu_kernels  # noqa: E402

WORK = Path(__file__).parents[2] / ".work"
NAME = "SmolLM2-135M-Instruct"


@contextmanager
def engine(folder: Path | str, policy: str | None = None, **options: Any) -> Iterator[LLM]:
    """An in-process engine on ``folder``, freed on leaving; ``policy`` is for merged checkpoints."""
    flexquant = options.pop("flexquant", {}) | ({"policy": policy} if policy is not None else {})
    # Stock vLLM needs them too, for the checkpoints that merged ones are compared with.
    provide_cpu_kernels()
    options = {"enforce_eager": True, "max_model_len": 1024, **options}
    with in_process.engine(folder, flexquant=flexquant, **options) as llm:
        yield llm


Answers = list[tuple[list[int], list[dict[int, float]]]]


def answers(llm: LLM, prompts: list[Any], **sampling: Any) -> Answers:
    """Greedy answers: for every prompt the token ids, and at every step the top logprobs by token id."""
    from vllm import SamplingParams

    parameters = SamplingParams(**{"temperature": 0, "max_tokens": 16, "logprobs": 5, **sampling})
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [
        (
            list(output.outputs[0].token_ids),
            [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def made(path: Path) -> Path:
    if not (path / "config.json").is_file():
        pytest.fail(
            f"{path.relative_to(WORK.parent)} is missing: run the tests with 'make test', which makes it"
        )
    return path


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct in 16 bit."""
    return made(WORK / NAME)


@pytest.fixture(scope="session")
def real_variants() -> dict[str, Path]:
    """Its variants, as ``flexquant quantize`` wrote them."""
    return {name: made(WORK / "variants" / NAME / name) for name in ("w8a8", "w4a16")}


@pytest.fixture(scope="session")
def real_merged() -> Path:
    """Its variants, merged by ``flexquant merge``."""
    return made(WORK / "merged" / NAME)


@pytest.fixture(scope="session")
def tiny_merged(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function: architecture, num_layers -> folder with w8a8, w4a16 and merged of a random model."""
    from flexquant.merge import merge_checkpoints
    from tests.checkpoints import make_checkpoint

    @functools.cache
    def make(architecture: str = "llama", num_layers: int = 4) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        sources = {
            scheme: make_checkpoint(folder / scheme, architecture, scheme, num_layers=num_layers)
            for scheme in ("w8a8", "w4a16")
        }
        merge_checkpoints(sources, folder / "merged")
        return folder

    return make
