# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What is loaded: of each variant the layers that some plan of the policy takes, and nothing else."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.module_names import layer_number
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint
from tests.checkpoints import fold_final_norm, make_checkpoint, make_pair
from tests.integration.conftest import answers, change, check_variants, edited_json, engine, generate
from tests.integration.live_server import records_of
from tests.policies import SWITCHING, rules

pytestmark = pytest.mark.engine

SMALL = {"max_model_len": 256, "max_num_seqs": 4}
THREE = SWITCHING.replace("use: w4a16", "use: fine").replace('"0": w8a8', '"0": fine, "1": w8a8')
PROMPTS = ["hello", "abc"]
ONE_LAYER = rules('- use: {default: w4a16, layers: {"1": w8a8}}')
"""A policy under which each of the variants lacks layers that the other has."""
WITHIN = rules('- use: {default: w4a16, layers: {"0": w8a8}}')
POLICIES = ("w8a8", "w4a16", ONE_LAYER, WITHIN)
ROTATION = "R4_input"
DERIVE = "derive: {w4a8: {from: w4a16, activations: int8}}\n"


@pytest.fixture(scope="module")
def whole(merged) -> dict[str, Any]:
    """Return what an engine with all layers of both variants answers, keyed by policy."""
    return dict(zip(POLICIES, generate(merged, list(POLICIES), PROMPTS, **SMALL), strict=True))


@pytest.fixture(scope="module")
def both(whole) -> dict[str, Any]:
    """Return the trace's header of an engine with both variants."""
    return whole["w8a8"].header


@pytest.mark.oldest
def test_a_variant_that_no_plan_uses_is_not_loaded(both, merged, tiny_merged):
    sampling = {"max_tokens": 4, "ignore_eos": True}
    batches, options = (PROMPTS[:1], PROMPTS), {"sampling": sampling, **SMALL}
    (alone,) = generate(merged, ["w8a8"], *batches, **options)
    found, held = alone.header["weight_bytes"], both["weight_bytes"]
    assert set(held) == {"w8a8", "w4a16", "shared"} and set(found) == {"w8a8", "shared"}
    assert sum(found.values()) == held["w8a8"] + held["shared"]
    (stock,) = generate(tiny_merged() / "w8a8", None, *batches, **options)
    assert alone.answers == stock.answers


class OneLayer(NamedTuple):
    """What is left of an engine whose only plan takes one layer of w8a8."""

    answers: list[Any]
    header: dict[str, Any]
    held: set[str]
    """The names of the parameters."""
    attention: list[str]
    """The names of the attention layers."""
    status: dict[str, Any]
    without: list[set[int | None]]
    """The layers of each variant that had no memory even before they were left out."""


@pytest.fixture(scope="module")
def one_layer(merged, tmp_path_factory) -> OneLayer:
    from flexquant.serving.worker import variants

    without: list[set[int | None]] = []
    leave_out = variants.leave_out

    def watch(variant, layers, registered):
        linears = {name: p for name, p in variant.named_parameters() if "_proj.weight" in name}
        without.append({layer_number(name) for name, weight in linears.items() if weight.is_meta})
        leave_out(variant, layers, registered)

    trace = tmp_path_factory.mktemp("one-layer") / "trace.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "leave_out", watch)
        with engine(merged, ONE_LAYER, flexquant={"trace": str(trace)}, **SMALL) as llm:
            found = answers(llm, PROMPTS)
            (held,) = llm.apply_model(lambda model: {name for name, _ in model.named_parameters()})
            attention = list(llm.llm_engine.vllm_config.compilation_config.static_forward_context)
            (status,) = llm.collective_rpc("flexquant_status")
    return OneLayer(found, records_of(trace)[0], held, attention, status, without)


@pytest.mark.oldest
def test_only_the_layers_in_use_have_memory(one_layer, both):
    held, used = both["weight_bytes"], one_layer.header["weight_bytes"]
    scales = used["w8a8"] - held["w8a8"] // 4  # vLLM 0.26 keeps three of an attention layer, 4 bytes each
    assert scales in (0, 3 * 4)
    assert used["w8a8"] == held["w8a8"] // 4 + scales
    assert used["w4a16"] == held["w4a16"] // 4 * 3 + 3 * scales
    assert used["shared"] == held["shared"] - 4 * scales
    assert one_layer.header["weight_bytes_in_16_bit"] == both["weight_bytes_in_16_bit"]
    assert one_layer.without == [{0, 2, 3}, {1}]
    for variant, layers in {"w8a8": {1}, "w4a16": {0, 2, 3}}.items():
        numbers = {layer_number(name) for name in one_layer.held if name.startswith(f"variants.{variant}.")}
        assert numbers - {None} == layers
    by_layers = one_layer.status["weight_bytes_by_layers"]
    runs = {variant: list(sizes) for variant, sizes in by_layers.items()}
    assert runs == {"w8a8": ["1"], "w4a16": ["0", "2-3"], "shared": [""]}
    assert {variant: sum(sizes.values()) for variant, sizes in by_layers.items()} == used


def test_answers_are_those_of_an_engine_with_all_layers(one_layer, whole):
    expected = whole[ONE_LAYER].answers
    assert [one_layer.answers] == expected
    assert expected not in (whole["w8a8"].answers, whole["w4a16"].answers)
    in_order = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    assert one_layer.attention == in_order, "in the KV cache's order"


def test_a_matrix_that_absent_layers_share_has_memory(tmp_path):
    """The first layer that is built with an online rotation makes the matrix for all layers."""
    sources = make_pair(tmp_path)
    for source in sources.values():
        rotate_online(source)
    merge_checkpoints(sources, tmp_path / "merged")
    with engine(tmp_path / "merged", ONE_LAYER, **SMALL) as llm:
        (down,) = llm.apply_model(lambda model: model.variants["w8a8"].model.layers[1].mlp.down_proj)
        matrix = down.get_submodule(ROTATION).weight.partitions[0]
    assert torch.equal(matrix, torch.eye(matrix.shape[0]))


def rotate_online(folder: Path) -> None:
    """Let the inputs of every layer's down_proj be multiplied by the identity, as vLLM scales it."""
    apply = [{"targets": ["re:.*down_proj$"], "location": "input"}]
    transform = {"config_groups": {"R4": {"type": "random-matrix", "apply": apply}}}
    with edited_json(folder / "config.json") as config:
        config["quantization_config"]["transform_config"] = transform
    tensors = load_file(folder / "model.safetensors")
    width = config["intermediate_size"]
    for number in range(config["num_hidden_layers"]):
        name = f"model.layers.{number}.mlp.down_proj.{ROTATION}.weight"
        tensors[name] = torch.eye(width, dtype=torch.bfloat16) * width**0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_layers_in_use_beside_weights_on_the_host(one_layer, merged):
    """vLLM copies each layer to the host when it is built, even if FlexQuant then leaves it out."""
    with engine(merged, ONE_LAYER, cpu_offload_gb=1, **SMALL) as llm:
        assert answers(llm, PROMPTS) == one_layer.answers


def test_tensors_of_layers_that_no_plan_takes_are_not_read(one_layer, merged, tmp_path):
    folder = shutil.copytree(merged, tmp_path / "partly")
    keep_tensors(folder, lambda k: k.startswith("shared.") or (layer_number(k) == 1) == k.startswith("w8a8."))
    with engine(folder, ONE_LAYER, **SMALL) as llm:
        assert answers(llm, PROMPTS) == one_layer.answers


def test_another_policy_may_take_the_layers_that_are_there_and_no_others(whole, merged):
    layered = '{default: w4a16, layers: {"0": w8a8, "2": w8a8}}'
    half = rules(f"- {{when: {{phase: decode}}, use: {layered}}}", "- use: w4a16")
    with engine(merged, half, **SMALL) as llm:

        def change_to(policy: str) -> dict[str, Any]:
            return change(llm, "another", yaml.safe_load(policy))

        before = llm.collective_rpc("flexquant_status")
        refused = change_to(rules("- use: w8a8"))["refused"]
        assert "another uses layers 1,3 of w8a8, but the server has loaded its layers 0,2 alone" in refused
        with pytest.raises(FlexQuantError, match="take their weights at the start alone"):
            llm.collective_rpc("reload_weights")
        assert llm.collective_rpc("flexquant_status") == before
        assert "refused" not in change_to(WITHIN)
        assert [answers(llm, PROMPTS)] == whole[WITHIN].answers


def test_a_derived_variant_and_its_source_have_the_layers_that_plans_take(merged):
    """The layers are one of each variant, or the same; the derived one shares what both have."""
    one = DERIVE + rules('- use: {default: w8a8, layers: {"0": w4a8, "3": w4a16}}')
    both = DERIVE + rules("- {when: {phase: decode}, use: w4a8}", "- use: w4a16")
    expected, *_ = generate(merged, [one, both, "w8a8"], PROMPTS, **SMALL)
    with engine(merged, one, **SMALL) as llm:
        assert [answers(llm, PROMPTS)] == expected.answers
        (status,) = llm.collective_rpc("flexquant_status")
    layers = {variant: list(sizes) for variant, sizes in status["weight_bytes_by_layers"].items()}
    assert layers == {"w8a8": ["1-2"], "w4a16": ["3"], "w4a8": ["0"], "shared": [""]}


def keep_tensors(folder: Path, is_left) -> None:
    """Remove the tensors from a merged checkpoint for which ``is_left`` is false."""
    with edited_json(folder / "model.safetensors.index.json") as index:
        for shard in set(index["weight_map"].values()):
            tensors = {key: tensor for key, tensor in load_file(folder / shard).items() if is_left(key)}
            save_file(tensors, folder / shard, metadata={"format": "pt"})
        index["weight_map"] = {key: shard for key, shard in index["weight_map"].items() if is_left(key)}


def test_weights_outside_the_decoder_layers_are_held_once(both):
    assert both["weight_bytes"]["shared"] >= 2 * 320 * 128 * 2, "embedding and head"


def test_three_variants_and_layered_plans_of_all(tmp_path):
    schemes = {"w8a8": ("w8a8", 64), "w4a16": ("w4a16", 128), "fine": ("w4a16", 32)}
    sources = {
        name: make_checkpoint(tmp_path / name, scheme=scheme, num_layers=3, group_size=size)
        for name, (scheme, size) in schemes.items()
    }
    (tmp_path / "three.yaml").write_text(THREE)
    merge_checkpoints(sources, tmp_path / "merged", policy=str(tmp_path / "three.yaml"))
    trace, prompts = tmp_path / "routes.jsonl", ["a b c", "d e f", "g h i"]
    with engine(tmp_path / "merged", flexquant={"trace": str(trace)}, **SMALL) as llm:
        for batch in (prompts[:1], prompts):
            answers(llm, batch, max_tokens=4, ignore_eos=True)
    header, *passes = records_of(trace)
    assert header["policy"] == "the checkpoint's policy"
    taken = {(p["phase"], p["sequences"], p["plan"]) for p in passes}
    assert {("prefill", 1, "w8a8"), ("decode", 1, "fine"), ("decode", 3, "fine+w8a8[1]+w4a16[2]")} <= taken


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("key", "parameter"),
    [
        ("w8a8.model.layers.1.mlp.down_proj.weight_scale", "'w8a8'.* 'model.layers.1.mlp.down_proj"),
        pytest.param(
            "w8a8.model.layers.1.self_attn.k_proj.weight",
            "'w8a8'.* 'model.layers.1.self_attn.qkv_proj.weight'",
            marks=pytest.mark.full,
        ),
        ("w4a16.model.layers.0.mlp.up_proj.weight_packed", "'w4a16'.* 'model.layers.0.mlp.gate_up_proj"),
        ("shared.model.layers.0.self_attn.q_proj.bias", "'w8a8'.* 'model.layers.0.self_attn.qkv_proj.bias'"),
        ("shared.model.layers.1.input_layernorm.weight", "'w8a8'.* 'model.layers.1.input_layernorm.weight'"),
        ("shared.model.norm.weight", "'w8a8'.* 'model.norm.weight'"),
        ("shared.lm_head.weight", "'w8a8'.* 'lm_head.weight'"),
    ],
)
def test_a_missing_tensor_is_named(key, parameter, with_biases, tmp_path):
    folder = shutil.copytree(with_biases, tmp_path / "broken")
    assert key in read_tensors(folder)
    keep_tensors(folder, lambda other: other != key)
    with pytest.raises(FlexQuantError, match=parameter), engine(folder, "phase", **SMALL):
        pass


@pytest.fixture(scope="module")
def with_biases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("biases")
    merge_checkpoints(make_pair(folder, "qwen2"), folder / "merged")
    return folder / "merged"


def test_a_number_that_is_not_finite_is_not_served(with_biases, tmp_path):
    folder = shutil.copytree(with_biases, tmp_path / "broken")
    (file,) = {ref.file for key, ref in read_tensors(folder).items() if key.endswith("o_proj.weight_packed")}
    tensors = load_file(file)
    tensors["w4a16.model.layers.1.self_attn.o_proj.weight_scale"][3, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(FlexQuantError, match="o_proj.weight_scale' holds NaN"), engine(folder, **SMALL):
        pass


@pytest.mark.parametrize("variant", ["w8a8", "w4a16"])
def test_a_split_variant_is_served_by_stock_vllm_as_its_source(variant, tiny_merged, tmp_path):
    folder = tiny_merged()
    split_checkpoint(folder / "merged", variant, tmp_path / "plain")
    with engine(tmp_path / "plain", **SMALL) as llm:
        assert llm.model_config.architectures == ["LlamaForCausalLM"]
        found = answers(llm, PROMPTS)
    (source,) = generate(folder / variant, None, PROMPTS, **SMALL)
    assert [found] == source.answers


@pytest.mark.oldest
def test_variants_with_final_norms_and_heads_of_their_own(tmp_path):
    sources = make_pair(tmp_path, change=fold_final_norm)
    merge_checkpoints(sources, tmp_path / "merged")
    w8a8, _, phase = check_variants(tmp_path / "merged", sources, PROMPTS, more=["phase"], **SMALL)
    assert phase.header["weight_bytes"]["w4a16"] > 320 * 128 * 2
    (tokens, logprobs), _ = phase.answers[0]
    (tokens_in_w8a8, logprobs_in_w8a8), _ = w8a8.answers[0]
    assert (tokens[0], logprobs[0]) == (tokens_in_w8a8[0], logprobs_in_w8a8[0]), "the first pass is w8a8's"
    assert logprobs[1] != logprobs_in_w8a8[1], "the second is not"
