# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What cannot be served is refused before anything is loaded, in one sentence."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from examples.vllm_server import ServerError, vllm_serve
from flexquant.doctor.examining import built_without_weights
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.policy.rules import load_policy
from flexquant.serving.config import served_policy
from flexquant.serving.worker.pass_records import trace_file
from flexquant.serving.worker.worker_extension import change_policy
from flexquant.tuning.candidates import FROM_INT4
from tests.architectures import chain
from tests.architectures.models import model_type
from tests.checkpoints import EXPERTS, make_pair
from tests.foreign import write_foreign
from tests.integration.conftest import edited_json, engine
from tests.integration.live_server import flexquant_options
from tests.policies import rules
from tests.states import make_variants, merge_twins

pytestmark = pytest.mark.oldest

LAYER = rules('- use: {default: w8a8, layers: {"%s": w4a16}}')


def configure(folder, **options):
    arguments = EngineArgs(model=str(folder), max_model_len=256, enforce_eager=True, **options)
    return arguments.create_engine_config()


def refusal(folder, **options) -> str:
    with pytest.raises(FlexQuantError) as caught:
        configure(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def flexquant(**options):
    return {"additional_config": {"flexquant": options}}


def edited(merged, tmp_path, **section):
    folder = shutil.copytree(merged, tmp_path / "edited")
    with edited_json(folder / "config.json") as config:
        config["quantization_config"] |= section
        for key in (key for key, value in section.items() if value is None):
            del config["quantization_config"][key]
    return folder


def test_a_good_configuration_is_accepted(merged):
    configure(merged, **flexquant(policy="phase"))


BEYOND = "model.layers.99.mlp.experts"


@pytest.mark.parametrize(
    ("section", "policy", "found"),
    [
        ({}, rules("- use: fp8"), ["'fp8'", "w4a16, w8a8"]),
        ({}, LAYER % 99, ["layer 99", "4 layers"]),
        ({}, "fastest", ["phase-batch-layer"]),
        ({"mixable": [["w8a8"], ["w4a16"]]}, LAYER % 0, ["residual"]),
        (
            {"shared_modules": ["lm_head", BEYOND]},
            "phase",
            [f"'{BEYOND}'", "4 decoder layers", "merge it again"],
        ),
        ({"schema_version": 3}, "phase", ["version 3", "upgrade"]),
        ({"base_architecture": "NewForCausalLM"}, "phase", ["cannot build NewForCausalLM", "update vLLM"]),
    ],
)
def test_a_checkpoint_or_a_policy_that_does_not_fit(merged, tmp_path, section, policy, found):
    folder = edited(merged, tmp_path, **section) if section else merged
    message = refusal(folder, **flexquant(policy=written(policy, tmp_path)))
    assert all(part in message for part in found)


ALLOWED = {"allow_incompatible_kv": True}
APART = {"kv_compatibility": {"compatible": False, "message": "k_proj is doubled"}}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("section", "options", "found"),
    [
        (APART, {}, "phase-batch lets w4a16 and w8a8 read one KV cache"),
        (APART | {"mixable": [["w8a8"], ["w4a16"]]}, flexquant(policy="phase"), "k_proj is doubled"),
        (APART, flexquant(policy="w4a16") | {"kv_transfer_config": CONNECTOR}, "a KV connector lets w4a16"),
        (APART, flexquant(policy="one-copy"), None),
        (APART, flexquant(policy="w8a8"), None),
        (APART, flexquant(**ALLOWED), None),
        ({"kv_compatibility": None}, {}, "the merge did not compare them"),
        ({"kv_compatibility": None}, flexquant(policy="w8a8"), None),
    ],
)
def test_caches_that_the_merge_did_not_find_alike_are_not_shared(merged, tmp_path, section, options, found):
    folder = edited(merged, tmp_path, **section)
    if found is None:
        configure(folder, **options)
    else:
        message = refusal(folder, **options)
        assert found in message and '{"flexquant": {"allow_incompatible_kv": true}}' in message


def test_a_cache_that_one_variant_wrote_is_not_handed_to_another_by_a_change(tmp_path):
    """A server of the nested variant alone has the weights of the other one too."""
    merge_checkpoints(make_pair(tmp_path), tmp_path / "merged", nested="near")
    folder = edited(tmp_path / "merged", tmp_path, **APART)
    said = pytest.raises(FlexQuantError, match="w4a16 lets w4a16 and w8a8 read one KV cache")
    for consent, expected in (({}, said), (ALLOWED, nullcontext())):
        config = configure(folder, **flexquant(policy="w8a8", **consent))
        with built_without_weights(config) as model, expected:
            after = served_policy(config, model.merged, load_policy("w4a16"))
            change_policy(model, after, None, None)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_the_method_that_a_published_checkpoint_is_in_may_be_named(tiny_merged, tmp_path, method):
    folder = source = tiny_merged() / "w4a16"
    if method != "compressed-tensors":
        folder = write_foreign(source, tmp_path / method, method)
    published = {"config_format": "flexquant", "max_num_batched_tokens": 256}
    for named in (None, "flexquant", method):
        assert configure(folder, quantization=named, **published).model_config.quantization == "flexquant"
    other = "awq" if method == "gptq" else "gptq"
    assert f"--quantization {other} is not the format of" in refusal(folder, quantization=other, **published)
    if method != "compressed-tensors":  # what vLLM calls it on a GPU
        configure(folder, quantization=f"{method}_marlin", **published)


def test_a_merged_checkpoint_drafts_for_no_other(merged):
    drafting = {"method": "draft_model", "model": str(merged), "num_speculative_tokens": 2}
    assert "drafts of a merged checkpoint, but" in refusal(merged, speculative_config=drafting)


def written(policy: str, folder: Path) -> str:
    """Return the name of a built-in policy, or the file into which a text is written."""
    if "\n" not in policy:
        return policy
    (folder / "policy.yaml").write_text(policy)
    return str(folder / "policy.yaml")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (flexquant(polcy="phase"), "'polcy'"),
        (flexquant(policy=3), "3"),
        (flexquant(verify="yes"), "'flexquant.verify' is 'yes'; give true or false"),
        (flexquant(verify=1), "'flexquant.verify' is 1; give true or false"),
        (flexquant(trace_mib=True), "'flexquant.trace_mib' is True; give a whole number from 1 on"),
        (flexquant(trace_mib=0), "'flexquant.trace_mib' is 0; give a whole number from 1 on"),
        (flexquant(trace_mib="1"), "'flexquant.trace_mib' is '1'; give a whole number from 1 on"),
        (flexquant(head="fp8"), "'flexquant.head' is 'fp8'; give stored or int8"),
        (flexquant(kernels="humming"), "'flexquant.kernels' is 'humming'; give a mapping of variants"),
        (flexquant(kernels={"w4a8": "marlin"}), "has 'w4a8', no variant with weights; allowed: w8a8,"),
        (flexquant(policy="one-copy", kernels={FROM_INT4: "amx"}), f"has '{FROM_INT4}', no variant with"),
        ({"additional_config": {"flexquant": "phase"}}, "'phase'"),
    ],
)
def test_mistaken_options(merged, options, found):
    message = refusal(merged, **options)
    assert found in message and "additional-config" in message


CUSTOM = {"method": "custom_class", "model": "a.B", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"runner": "pooling"}, "runner"),
        ({"speculative_config": CUSTOM}, "draft_model, eagle"),
        ({"prefill_context_parallel_size": 2}, "context parallel"),
        ({"offload_backend": "prefetch", "offload_group_size": 2}, "cpu-offload-gb"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "drop --weight-transfer-config"),
        ({"hf_overrides": {"head_dtype": "float32"}, **flexquant(head="int8")}, "drop 'head_dtype'"),
        ({"pipeline_parallel_size": 8}, "rank 0 none of the model's 4 decoder layers"),
    ],
)
def test_unsupported_vllm_features(merged, options, named):
    with pytest.raises(Exception, match=named):
        configure(merged, **options)


def test_answers_that_do_not_depend_on_the_batch_take_one_plan(merged, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for policy in ("phase", "phase-batch"):
        message = refusal(merged, **flexquant(policy=policy))
        assert "VLLM_BATCH_INVARIANT=1" in message and "throughout, of w8a8, w4a16" in message
    for policy in ("w8a8", "w4a16", LAYER % "0-1"):
        configure(merged, **flexquant(policy=written(policy, tmp_path)))


@pytest.mark.parametrize(
    ("rescaled", "named"),
    [
        (["w4a16"], r"\(w4a16 against third; "),
        (["w4a16", "third"], r"\(third, w4a16; .* does not know whether .* fit each other"),
    ],
)
def test_adapters_for_variants_compared_with_one_that_is_not_served(merged, tmp_path, rescaled, named):
    variants = json.loads((merged / "config.json").read_text())["quantization_config"]["variants"]
    variants["third"] = variants["w4a16"] | {"prefix": "third."}
    folder = edited(merged, tmp_path, variants=variants, mixable=[list(variants)], rescaled=rescaled)
    policy = written(rules("- {when: {phase: decode}, use: w4a16}", "- use: third"), tmp_path)
    message = refusal(folder, enable_lora=True, **flexquant(policy=policy))
    assert re.search(named, message) and "w8a8" not in message


def test_features_that_layers_with_a_state_lack(tmp_path):
    merged = merge_twins(make_variants(tmp_path, "qwen3_next"))
    configure(merged)
    assert "LoRA for models with layers that keep a state" in refusal(merged, enable_lora=True)


def test_replicas_that_run_expert_layers_together_need_one_plan(tiny_merged):
    mixture = tiny_merged("qwen3_moe", 2, (EXPERTS,)) / "merged"
    assert "data parallelism" in refusal(mixture, data_parallel_size=2, **flexquant(policy="phase"))
    configure(mixture, data_parallel_size=2, **flexquant(policy="w8a8"))


def test_prompt_embeddings_where_each_variant_has_its_own_embedding(merged, tmp_path):
    """The component that embeds ids does not know which variant will run the embeddings."""
    folder = edited(merged, tmp_path, shared_modules=["lm_head", "model.norm"])
    assert "--enable-prompt-embeds" in refusal(folder, enable_prompt_embeds=True, **flexquant(policy="phase"))
    last = '{default: w8a8, layers: {"-1": w4a16}}'
    for others, fits in (("w4a16", True), ("w8a8", False)):  # the embedding is that of the last layer
        policy = written(rules(f"- {{when: {{phase: decode}}, use: {last}}}", f"- use: {others}"), tmp_path)
        with nullcontext() if fits else pytest.raises(FlexQuantError, match="--enable-prompt-embeds"):
            configure(folder, enable_prompt_embeds=True, **flexquant(policy=policy))
    configure(merged, enable_prompt_embeds=True, **flexquant(policy="phase"))


@pytest.mark.parametrize("name", ["FalconForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM"])
def test_prompt_embeddings_by_an_embedding_of_another_name(name: str, tmp_path: Path) -> None:
    chain.make_variants(name, str(model_type(name)), {}, tmp_path)
    merge_checkpoints({variant: tmp_path / variant for variant in chain.VARIANTS}, tmp_path / "merged")
    options = {"enable_prompt_embeds": True, **flexquant(policy="phase")}
    configure(tmp_path / "merged", **options)
    without = edited(tmp_path / "merged", tmp_path, shared_modules=["lm_head", "transformer.wpe"])
    assert "--enable-prompt-embeds" in refusal(without, **options)


@pytest.mark.engine
def test_a_shared_module_that_vllm_does_not_build(merged, tmp_path):
    folder = edited(merged, tmp_path, shared_modules=["lm_head", "model.embedding", "model.norm"])
    refused = pytest.raises(FlexQuantError, match="'model.embedding'.*LlamaForCausalLM.*flexquant split")
    with refused, engine(folder, "phase", max_model_len=256):
        pass


def test_every_worker_writes_a_trace_of_its_own(merged):
    config, names = configure(merged, **flexquant(trace="trace.jsonl")), []
    for replica in range(2):
        config.parallel_config.data_parallel_index = replica  # as vLLM's engine core does
        for config.parallel_config.rank in range(2):  # as vLLM's workers do
            names.append(trace_file(config))
    assert names == ["trace.jsonl", "trace.jsonl.rank1", "trace.jsonl.dp1", "trace.jsonl.dp1.rank1"]


@pytest.mark.engine
def test_vllm_serve_prints_the_sentence_and_ends(merged):
    refused = pytest.raises(ServerError, match="unknown policy 'fastest': the built-in ones are")
    with refused, vllm_serve(merged, *flexquant_options(policy="fastest")):
        pass
