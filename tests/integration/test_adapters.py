# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""LoRA adapters over a merged checkpoint: under every plan what stock vLLM makes of adapter and variant."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.checkpoints import StateDict, make_checkpoint
from tests.integration.conftest import answers, distance, edited_json, engine, every_plan_of, take_policy
from tests.policies import LAYERED_DECODE, rules

pytestmark = pytest.mark.engine

RANK, LAYERS, HIDDEN, KV, WIDE = 8, 4, 128, 64, 256
WIDTHS = {"q": HIDDEN, "k": KV, "v": KV, "o": HIDDEN}
ATTENTION = {f"self_attn.{name}_proj": (HIDDEN, outputs) for name, outputs in WIDTHS.items()}
MLP = {"mlp.gate_proj": (HIDDEN, WIDE), "mlp.up_proj": (HIDDEN, WIDE), "mlp.down_proj": (WIDE, HIDDEN)}
"""Inputs and outputs of each linear of a layer."""
# One slot more than adapters: on a CPU, vLLM gives prompts without an adapter what the last slot holds.
OPTIONS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK, "max_model_len": 256}
POLICIES = {"w8a8": "phase", "fp8": "fp8-phase-batch"}
PROMPTS = ["The harbour was quiet", "In the beginning", "A box of old letters"]


def make_adapter(folder: Path, seed: int, modules: dict[str, tuple[int, int]]) -> Path:
    """Write a random adapter as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (inputs, outputs) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 16
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "task_type": "CAUSAL_LM", "bias": "none"}
    targets = sorted({module.rpartition(".")[2] for module in modules})
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return vLLM's adapter of each prompt: two adapters, the second for attention alone, and none."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    made = [make_adapter(folder / "one", 1, ATTENTION | MLP), make_adapter(folder / "two", 2, ATTENTION)]
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(made, 1)] + [None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model in 16 bit and its variants, merged in pairs."""
    folder = tmp_path_factory.mktemp("model")
    for scheme in (None, "w8a8", "fp8", "w4a16"):
        make_checkpoint(folder / (scheme or "16-bit"), scheme=scheme, num_layers=LAYERS)
    for scheme in ("w8a8", "fp8"):
        sources = {name: folder / name for name in (scheme, "w4a16")}
        merge_checkpoints(sources, folder / f"{scheme}-w4a16", policy=POLICIES[scheme])
    return folder


def served(folder: Path, policies: list[str], adapters: list[Any] | None) -> list[Any]:
    """Return what each policy answers with the adapters, and what the last one answers without them."""
    found = []
    with engine(folder, every_plan_of(policies), **OPTIONS) as llm:
        for policy in policies:
            take_policy(llm, policy)
            found.append(answers(llm, PROMPTS, adapters, ignore_eos=True))
        return [*found, answers(llm, PROMPTS, ignore_eos=True)]


def stock(folder: Path, adapters: list[Any]) -> Any:
    with engine(folder, **OPTIONS) as llm:
        return answers(llm, PROMPTS, adapters, ignore_eos=True)


def test_every_variant_with_adapters_is_stock_vllm(folder: Path, adapters: list[Any]) -> None:
    """Each sequence of a batch has an adapter of its own, or none."""
    policies = [rules("- use: fp8"), "w4a16", LAYERED_DECODE.replace("w8a8", "fp8")]
    *found, without = served(folder / "fp8-w4a16", policies, adapters)
    assert found[:2] == [stock(folder / variant, adapters) for variant in ("fp8", "w4a16")]
    assert [a == b for a, b in zip(found[2], without, strict=True)] == [False, False, True]
    assert found[2] not in found[:2]


def test_w8a8_and_a_change_of_plans(folder: Path, adapters: list[Any]) -> None:
    """Stock vLLM has no adapters on this kernel: the 16-bit model with the same adapters has to be near."""
    w8a8, phase, without = served(folder / "w8a8-w4a16", ["w8a8", "phase"], adapters)
    expected = stock(folder / "16-bit", adapters)
    assert distance(w8a8, expected) < distance(phase, expected) < distance(without[:2], expected[:2]) / 2


@pytest.mark.full
def test_int8_from_one_copy_with_adapters(folder: Path, adapters: list[Any]) -> None:
    """The adapters of the INT4 linears are those of the INT8 linears that are computed from them."""
    int8, int4, without = served(folder / "w8a8-w4a16", ["w8a8-from-int4", "w4a16"], adapters)
    assert 0 < distance(int8, int4) < distance(without[:2], int4[:2]) / 2


@pytest.mark.full
def test_a_16_bit_model_with_adapters(folder: Path, adapters: list[Any]) -> None:
    """Stock vLLM's adapters on the model itself; those of INT8 have to be near."""
    policies = [rules("- use: bf16"), "int8-from-16-bit"]
    in_16_bit, in_int8, without = served(folder / "16-bit", policies, adapters)
    assert in_16_bit == stock(folder / "16-bit", adapters)
    assert 0 < distance(in_int8, in_16_bit) < distance(without[:2], in_16_bit[:2]) / 2


@pytest.mark.full
def test_nested_weights_with_adapters(folder: Path, adapters: list[Any], tmp_path: Path) -> None:
    merge_checkpoints({n: folder / n for n in ("w8a8", "w4a16")}, tmp_path / "merged", nested="near")
    (plain, _), (nested, without) = (
        served(merged, ["w8a8"], adapters) for merged in (folder / "w8a8-w4a16", tmp_path / "merged")
    )
    assert distance(nested, plain) < distance(without[:2], plain[:2]) / 2


@pytest.mark.full
def test_layers_of_two_variants_with_adapters(folder: Path, adapters: list[Any]) -> None:
    """No variant has all layers: adapters have to find each layer in the variant that has it."""
    apart = rules('- use: {default: fp8, layers: {"0": w4a16}}')
    expected, *_ = served(folder / "fp8-w4a16", [apart, "w4a16", rules("- use: fp8")], adapters)
    with engine(folder / "fp8-w4a16", apart, **OPTIONS) as llm:
        assert answers(llm, PROMPTS, adapters, ignore_eos=True) == expected


def smooth_norm(state: StateDict) -> StateDict:
    norm = "model.layers.1.input_layernorm.weight"
    names = (f"model.layers.1.self_attn.{projection}_proj.weight" for projection in "qkv")
    return state | {norm: state[norm] / 2} | {name: state[name] * 2 for name in names}


def smooth_up_to_down(state: StateDict) -> StateDict:
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    factors = torch.linspace(0.5, 2, WIDE).bfloat16()
    return state | {up: state[up] / factors[:, None], down: state[down] * factors}


@pytest.mark.parametrize("smooth", [smooth_norm, smooth_up_to_down])
def test_a_smoothed_variant_is_refused(smooth: Any, tmp_path: Path) -> None:
    """Its layers take other inputs than those that an adapter is trained on, whichever layers are loaded."""
    w8a8 = make_checkpoint(tmp_path / "w8a8", num_layers=LAYERS, transform=smooth)
    w4a16 = make_checkpoint(tmp_path / "w4a16", scheme="w4a16", num_layers=LAYERS)
    merge_checkpoints({"w8a8": w8a8, "w4a16": w4a16}, tmp_path / "merged")
    policies = ("phase", rules('- use: {default: w4a16, layers: {"1": w8a8}}'))

    def assert_refused(message: str) -> None:
        for policy in policies:
            with pytest.raises(FlexQuantError, match=message), engine(tmp_path / "merged", policy, **OPTIONS):
                pass

    assert_refused("LoRA for variants whose layers take scaled inputs .*w4a16 against w8a8")
    if smooth is smooth_norm:  # the norms show the smoothing too, where the record does not
        with edited_json(tmp_path / "merged" / "config.json") as config:
            config["quantization_config"]["rescaled"] = []
        norm = "model.layers.1.input_layernorm.weight"
        assert_refused(f"'w8a8' and 'w4a16' .* {norm}: one of them is smoothed")


@pytest.mark.full
def test_an_adapter_for_modules_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    """vLLM refuses it, and goes on answering."""
    from vllm.lora.request import LoRARequest

    adapter = make_adapter(tmp_path / "other", 3, {"self_attn.wrong_proj": (HIDDEN, HIDDEN)})
    with engine(folder / "w8a8-w4a16", "phase", **OPTIONS) as llm:
        with pytest.raises(Exception, match="wrong_proj"):
            llm.llm_engine.add_lora(LoRARequest("other", 1, str(adapter)))
        assert len(answers(llm, PROMPTS)) == len(PROMPTS)
