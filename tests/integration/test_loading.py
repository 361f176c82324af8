# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What is loaded: the variants that the policy can reach, whole, and nothing else."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint
from tests.checkpoints import fold_final_norm, make_checkpoint
from tests.integration.conftest import answers, engine, generate
from tests.policies import SWITCHING

pytestmark = pytest.mark.engine

SMALL = {"max_model_len": 256, "max_num_seqs": 4}
THREE = SWITCHING.replace("use: w4a16", "use: fine").replace('"0": w8a8', '"0": fine, "1": w8a8')

PROMPTS = ["hello", "abc"]


def serve(folder, policy, trace, prompts=("hello",), **options):
    """Ask for the first prompt, then for all; return both answers, the trace's header and its passes."""
    with engine(folder, policy, flexquant={"trace": str(trace)}, **SMALL, **options) as llm:
        found = [answers(llm, list(batch), max_tokens=4, ignore_eos=True) for batch in (prompts[:1], prompts)]
    header, *passes = [json.loads(line) for line in trace.read_text().splitlines()]
    return found, header, passes


@pytest.fixture(scope="module")
def both(tiny_merged, tmp_path_factory):
    """The trace's header of an engine with both variants."""
    return serve(tiny_merged() / "merged", "phase", tmp_path_factory.mktemp("both") / "trace.jsonl")[1]


@pytest.mark.oldest
def test_a_variant_that_no_plan_uses_is_not_loaded(both, tiny_merged, tmp_path):
    found, alone, _ = serve(tiny_merged() / "merged", "w8a8", tmp_path / "alone.jsonl", PROMPTS)
    assert set(both["weight_bytes"]) == {"w8a8", "w4a16", "shared"}
    assert set(alone["weight_bytes"]) == {"w8a8", "shared"}
    assert sum(alone["weight_bytes"].values()) == (
        both["weight_bytes"]["w8a8"] + both["weight_bytes"]["shared"]
    )
    sampling = {"max_tokens": 4, "ignore_eos": True}
    (stock,) = generate(tiny_merged() / "w8a8", None, PROMPTS[:1], PROMPTS, sampling=sampling, **SMALL)
    assert found == stock.answers


def test_weights_outside_the_decoder_layers_are_held_once(both):
    embedding_and_head = 2 * 320 * 128 * 2
    assert both["weight_bytes"]["shared"] >= embedding_and_head


def test_three_variants_and_layered_plans_of_all(tmp_path):
    schemes = {"w8a8": ("w8a8", 64), "w4a16": ("w4a16", 128), "fine": ("w4a16", 32)}
    sources = {
        name: make_checkpoint(tmp_path / name, scheme=scheme, num_layers=3, group_size=group_size)
        for name, (scheme, group_size) in schemes.items()
    }
    (tmp_path / "three.yaml").write_text(THREE)
    merge_checkpoints(sources, tmp_path / "merged", policy=str(tmp_path / "three.yaml"))
    _, _, passes = serve(tmp_path / "merged", None, tmp_path / "routes.jsonl", ["a b c", "d e f", "g h i"])
    taken = {(p["phase"], p["sequences"], p["plan"]) for p in passes}
    assert {("prefill", 1, "w8a8"), ("decode", 1, "fine"), ("decode", 3, "fine+w8a8[1]+w4a16[2]")} <= taken


@pytest.mark.oldest
def test_a_missing_tensor_is_named(tiny_merged, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_merged() / "merged", folder)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    key = "w8a8.model.layers.2.mlp.down_proj.weight_scale"
    shard = folder / index["weight_map"].pop(key)
    tensors = load_file(shard)
    del tensors[key]
    save_file(tensors, shard, metadata={"format": "pt"})
    index_file.write_text(json.dumps(index))
    with (
        pytest.raises(FlexQuantError, match=r"'w8a8'.* 'model.layers.2.mlp.down_proj.weight_scale'"),
        engine(folder, "w8a8", **SMALL),
    ):
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
    sources = {
        "w8a8": make_checkpoint(tmp_path / "w8a8", scheme="w8a8"),
        "w4a16": make_checkpoint(tmp_path / "w4a16", scheme="w4a16", transform=fold_final_norm),
    }
    merge_checkpoints(sources, tmp_path / "merged")

    policies = [*sources, "phase"]
    served = dict(zip(policies, generate(tmp_path / "merged", policies, PROMPTS, **SMALL), strict=True))
    stock = {variant: generate(source, None, PROMPTS, **SMALL)[0] for variant, source in sources.items()}
    for variant in sources:
        assert served[variant].answers == stock[variant].answers
    _, header, _ = serve(tmp_path / "merged", "phase", tmp_path / "routes.jsonl")
    assert header["weight_bytes"]["w4a16"] > 320 * 128 * 2
    (tokens, logprobs), _ = served["phase"].answers[0]
    (tokens_in_w8a8, logprobs_in_w8a8), _ = stock["w8a8"].answers[0]
    assert (tokens[0], logprobs[0]) == (tokens_in_w8a8[0], logprobs_in_w8a8[0]), "the first pass is w8a8's"
    assert logprobs[1] != logprobs_in_w8a8[1], "the second is not"
