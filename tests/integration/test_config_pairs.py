# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM makes of two configs decides whether they are one model's; the tests in `unit` rely on it.

vLLM builds its own model of a config, without weights; all that it reads for that is noted.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PretrainedConfig

from flexquant.doctor.examining import built_without_weights, engine_config
from flexquant.merge.same_model import keys_read
from tests.config_pairs import Pair, pairs

pytestmark = pytest.mark.full
ARGUMENTS = ("--config-format", "hf", "--skip-tokenizer-init", "--load-format", "dummy", "--enforce-eager")
PLAIN = (bool, int, float, str, tuple, list, torch.dtype, type(None))
IN_A_PASS = {"forward", "embed_input_ids", "compute_logits"}


class View(NamedTuple):
    model: dict[str, object]
    """Name of a module, with what it holds, and of a number that vLLM derives -> its value."""
    keys: set[str]
    """Keys of the config that the model's class read."""


def view(folder: Path, config: dict[str, Any]) -> View:
    """Write a config into a folder, and return what vLLM makes of it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    vllm_config = engine_config(str(folder), ARGUMENTS)
    of_model = vllm_config.model_config
    made: dict[str, object] = dataclasses.asdict(of_model.model_arch_config)
    del made["derived_max_model_len_and_key"]  # the key says where it is from
    made |= {"max_model_len": of_model.max_model_len, "dtype": of_model.dtype}
    keys: set[str] = set()
    plain = PretrainedConfig.__getattribute__

    def logged(self: PretrainedConfig, name: str) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("vllm.model_executor"):
            keys.add(name)
        return plain(self, name)

    PretrainedConfig.__getattribute__ = logged
    try:
        with built_without_weights(vllm_config) as model:
            made["parameters"] = len(list(model.parameters()))  # fewer, if the head is the embedding
            for name, module in model.named_modules():
                made[name] = type(module)
                made |= {f"{name}.{key}": value for key, value in _held(module)}
    finally:
        PretrainedConfig.__getattribute__ = plain
    return View(made, keys)


def _held(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what a module computes with: plain values, shapes, and what it reads of its config in a pass."""
    for key, value in vars(module).items():
        if isinstance(value, PLAIN):
            yield key, repr(value)
        elif key in ("impl", "router"):
            inside = vars(value).items()
            yield from ((f"{key}.{inner}", repr(v)) for inner, v in inside if isinstance(v, PLAIN))
        elif isinstance(value, PretrainedConfig):
            for inner in IN_A_PASS & vars(type(module)).keys():
                code = vars(type(module))[inner].__code__
                yield from ((f"{key}.{n}", vars(value)[n]) for n in code.co_names if vars(value).get(n))
    for key, parameter in module.named_parameters(recurse=False):
        yield key, (parameter.shape, parameter.dtype)


NEEDS_TORCHVISION = ("gemma3", "mistral3", "qwen2_5_vl")


def cases() -> list[object]:
    missing = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class imports torchvision")
    return [
        pytest.param(pair, id=pair.name, marks=missing if pair.name.split()[0] in NEEDS_TORCHVISION else ())
        for pair in pairs()
    ]


@pytest.mark.parametrize("pair", cases())
def test_vllm_makes_the_same_model_of_both_or_not(pair: Pair, tmp_path: Path) -> None:
    first, second = (view(tmp_path, config) for config in (pair.a, pair.b))
    assert (first.model == second.model) == pair.alike
    read = keys_read(pair.a)
    assert read is not None and len(first.keys) > 10
    assert {key for key in first.keys | second.keys if not key.startswith("_")} <= read.keys()
