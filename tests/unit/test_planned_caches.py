# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The bytes of a token and of states, and the experts of a token, that advise counts are those of vLLM."""

import json
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("vllm")

from flexquant.doctor.built_model import attention_layers
from flexquant.doctor.examining import built_without_weights
from flexquant.planning.planned_model import PlannedModel
from flexquant.serving.vllm_api import cleanup_dist_env_and_memory
from tests.architectures.models import small_config, source
from tests.architectures.outcomes import RESULTS, SERVED
from tests.prediction import planned
from tests.refusals import refused
from tests.vision import KINDS

FOUND = json.loads(RESULTS.read_text())["architectures"]
KINDS_OF_FALCON = {
    "of one KV head": {"multi_query": True, "new_decoder_architecture": False},
    "of many": {"multi_query": False, "new_decoder_architecture": False},
    "of some": {"new_decoder_architecture": True, "num_kv_heads": 2},
}
IN_MAKE_TEST = ("Apertus", "Falcon", "DeepseekV3", "Gemma4", "LlamaFor", "MiMoV2Flash", "Qwen3Next")
"""Beginnings of names: the others are tried by ``make test-full``."""


def cases() -> list[Any]:
    """Return parameters: an architecture, further fields, and devices, more than the small models' KV heads.

    States are compared on one device: vLLM has the groups of a convolution on every device. Its class of
    gpt-oss is built on no more devices than there are KV heads.
    """
    found = [
        (name, {}, 1 if "states" in one["features"] else 2 if name == "GptOssForCausalLM" else 4)
        for name, one in FOUND.items()
        if one["outcome"] == SERVED and name != "FalconForCausalLM"
    ]
    found += [("FalconForCausalLM", own, devices) for own in KINDS_OF_FALCON.values() for devices in (1, 4)]
    full = pytest.mark.full
    missing = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class imports torchvision")
    marks = {name: [] if name.startswith(IN_MAKE_TEST) else [full] for name, *_ in found}
    marks |= {name: [full, missing] for name in marks if name.startswith("Qwen3_5")}
    return [pytest.param(*case, id=f"{case[0]} {n}", marks=marks[case[0]]) for n, case in enumerate(found)]


@pytest.fixture(scope="module")
def models(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PlannedModel]]:
    """Read all models of the test below, before vLLM takes over an activation of transformers."""
    found = {}
    for item in request.session.items:
        if "devices" in getattr(item, "fixturenames", ()) and item.path == request.path:
            name, own = item.callspec.params["name"], item.callspec.params["own"]
            kind, fields = source(name, ()) or (FOUND[name]["model_type"], {})
            config = small_config(kind, **fields, **own)
            config.architectures = [name]
            config.save_pretrained(folder := tmp_path_factory.mktemp("model"))
            found[item.name] = folder, PlannedModel.read(str(folder))
    return found


@pytest.mark.parametrize(("name", "own", "devices"), cases())
def test_what_is_counted_is_vllms(name, own, devices, models, request):
    """A number of a state counts two bytes; on CPUs vLLM has some in float32."""
    from vllm import EngineArgs

    folder, model = models[request.node.name]
    options = {"skip_tokenizer_init": True, "max_model_len": 128, "tensor_parallel_size": devices}
    vllm_config = EngineArgs(str(folder), **options).create_engine_config()
    cleanup_dist_env_and_memory()  # a trial of kernels in this process has left groups of one rank
    with built_without_weights(vllm_config):
        specs = [layer.get_kv_cache_spec(vllm_config) for layer in attention_layers(vllm_config)]
    states = sum(2 * prod(shape) for spec in specs for shape in getattr(spec, "shapes", ()))
    token = sum(spec.page_size_bytes // spec.block_size for spec in specs if not hasattr(spec, "shapes"))
    if "latent attention" in FOUND[name]["features"]:
        with refused("has multi-head latent attention, and passes of such a model"):
            model.shape(("w8a8",), devices, {})
        return
    found = model.shape(("w8a8",), devices, {})
    assert (found.kv_bytes_per_token, found.state_bytes) == (token, states)
    experts = max(linear.active_experts for linear in found.linears["w8a8"])
    assert experts == max(1, vllm_config.model_config.get_num_experts_per_tok())


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_model_that_reads_images_the_language_model_is_counted(kind, tmp_path):
    config = KINDS[kind].config()
    text = config.get_text_config()
    model = planned(tmp_path, config.to_dict())
    assert model.has_towers
    found = model.shape(("bf16",), 1, {})
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    towers = ("visual", "vision_model", "vision_tower", "connector", "multi_modal_projector")
    of_text = (p.numel() for name, p in whole.named_parameters() if name.split(".")[1] not in towers)
    assert found.resident_bytes == 2 * sum(of_text)
    kinds = getattr(text, "layer_types", None) or []
    attending = 4 - kinds.count("linear_attention")
    assert found.kv_bytes_per_token == attending * 2 * text.num_key_value_heads * text.head_dim * 2


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "yarn"])
def test_no_value_is_needed_of_rotary_embeddings(rope, tmp_path):
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if rope == "longrope" else {}
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, **factors}
    config = small_config("llama", rope_parameters=parameters).to_dict()
    assert planned(tmp_path, config).shape(("w8a8",), 1, {}).kv_bytes_per_token == 4 * 2 * 2 * 32 * 2
