# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Speculative decoding: whatever drafts, the tokens are those that the policy gives without."""

import concurrent.futures
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import save_file
from vllm.platforms import current_platform

from tests.checkpoints import base_config, make_checkpoint
from tests.conftest import rest_full
from tests.integration import conftest
from tests.integration.conftest import answers, assert_alike, change, engine, every_plan_of, records_of
from tests.integration.test_mtp import FIRST, drafting
from tests.policies import DERIVE_INT8, rules

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="compares tokens of passes of unlike sizes"),
]

METHODS = ("ngram", "draft_model", "eagle", "dflash", "medusa", "eagle3")
DRAFTED = 3
TOKENS = 24
SAMPLING = {"max_tokens": TOKENS, "ignore_eos": True}
PROMPTS = ["one one one one one", "The three laws of motion", "def fibonacci(n: int) -> int:"]
POLICIES = {
    plan: rules(f"- {{when: {{phase: decode}}, use: {use}}}", "- use: w8a8")
    for plan, use in {"w4a16": "w4a16", "w8a8+w4a16[1]": "{default: w4a16, layers: {0: w8a8}}"}.items()
}
POLICIES["w8a8-from-int4"] = DERIVE_INT8 + rules(
    "- {when: {phase: decode}, use: w8a8-from-int4}", "- use: w4a16"
)
"""Policies, keyed by the plan of their decode passes. No rule names a batch size, which counts drafts too."""


def make_head(folder: Path, architecture: str, **more: Any) -> Path:
    """Write a random draft model of one layer that reads a target's hidden states, and return its folder."""
    torch.manual_seed(0)
    is_dflash, is_eagle3 = "DFlash" in architecture, "3" in architecture
    config = base_config("qwen3" if is_dflash else "llama", num_layers=1, **more)
    hidden, rows = config.hidden_size, config.num_attention_heads * config.head_dim
    kv, mlp = config.num_key_value_heads * config.head_dim, config.intermediate_size
    layer, read = ("midlayer", 2 * hidden) if is_eagle3 else ("layers.0", hidden)
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        f"{layer}.self_attn.q_proj.weight": (rows, read),
        **{f"{layer}.self_attn.{of}_proj.weight": (kv, read) for of in "kv"},
        f"{layer}.self_attn.o_proj.weight": (hidden, rows),
        **{f"{layer}.mlp.{of}_proj.weight": (mlp, hidden) for of in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (hidden, mlp),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if is_eagle3 or is_dflash:
        of_features = "hidden_norm" if is_dflash else f"{layer}.hidden_norm"
        norms = (f"{layer}.input_layernorm.weight", f"{of_features}.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (hidden,))
    if is_dflash:
        shapes |= {f"{layer}.self_attn.{of}_norm.weight": (config.head_dim,) for of in "qk"}
    state = {name: 0.1 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))
    return folder


def make_medusa(folder: Path) -> Path:
    """Write random Medusa heads, one for each drafted token, and return their folder."""
    generator, config = torch.Generator().manual_seed(0), base_config()
    shapes = {"blocks.{}.layers.0.weight": config.hidden_size, "lm_heads.{}.weight": config.vocab_size}
    state = {
        name.format(head): (0.1 * torch.randn(rows, config.hidden_size, generator=generator)).bfloat16()
        for name, rows in shapes.items()
        for head in range(DRAFTED)
    }
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_hidden_layers": 1}
    medusa = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_num_heads": DRAFTED}
    (folder / "config.json").write_text(json.dumps(medusa | sizes))
    return folder


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Return vLLM's speculative_config of each method. The 16-bit model drafts well, the others at random."""
    folder = tmp_path_factory.mktemp("drafts")
    reads = {"eagle_aux_hidden_state_layer_ids": [0, 1], "num_aux_hidden_states": 2}
    reads_too = {"target_layer_ids": [0, 1], "mask_token_id": 319}
    eagle3 = make_head(folder / "eagle3", "LlamaForCausalLMEagle3", draft_vocab_size=320, **reads)
    return {
        "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model": {"model": str(make_checkpoint(folder / "16-bit", scheme=None))},
        "eagle": {"model": str(make_head(folder / "eagle", "LlamaForCausalLM"))},
        "eagle3": {"model": str(eagle3)},
        "dflash": {"model": str(make_head(folder / "dflash", "DFlashDraftModel", dflash_config=reads_too))},
        "medusa": {"model": str(make_medusa(folder / "medusa"))},
    }


class Step(NamedTuple):
    """A step of the scheduler, as vLLM counts it."""

    tokens: int
    drafted: int
    accepted: int


class Run(NamedTuple):
    """What one policy answered."""

    answers: conftest.Answers
    passes: list[dict[str, Any]]
    steps: list[Step]


def run(folder: Path, speculative: dict[str, Any] | None) -> dict[str, Run]:
    """For each policy: answer one prompt, and then all side by side."""
    steps: list[Step] = []
    runs = {}
    with tempfile.TemporaryDirectory() as work:
        trace, union = Path(work, "trace.jsonl"), every_plan_of(list(POLICIES.values()))
        options = {"speculative_config": speculative, "max_model_len": 256, "disable_log_stats": False}
        with engine(folder, union, flexquant={"trace": str(trace)}, **options) as llm:
            core = llm.llm_engine.engine_core.engine_core
            take_step, schedule = core.step_fn, core.scheduler.schedule
            scheduled: list[int] = []

            def counted(*args: Any, **options: Any) -> Any:
                output = schedule(*args, **options)
                scheduled.append(output.total_num_scheduled_tokens)
                return output

            def step() -> Any:
                outputs, has_run = take_step()
                if has_run:
                    stats = outputs[0].scheduler_stats.spec_decoding_stats if outputs else None
                    drafts = (stats.num_draft_tokens, stats.num_accepted_tokens) if stats else (0, 0)
                    steps.append(Step(scheduled[-1], *drafts))
                return outputs, has_run

            core.step_fn, core.scheduler.schedule = step, counted
            for plan, policy in POLICIES.items():
                conftest.take_policy(llm, policy)
                told, before = len(records_of(trace)), len(steps)
                found = [*answers(llm, PROMPTS[:1], **SAMPLING), *answers(llm, PROMPTS, **SAMPLING)]
                runs[plan] = Run(found, records_of(trace)[told:], steps[before:])
    return runs


def run_by_itself(folder: Path, speculative: dict[str, Any]) -> dict[str, Run]:
    """Run in a process of its own: vLLM's n-gram method loads numba, after which no engine starts there."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(run, folder, speculative).result(timeout=300)


@pytest.fixture(scope="module")
def merged(tiny_merged) -> Path:
    return tiny_merged(num_layers=2) / "merged"


@pytest.fixture(scope="module")
def without(merged) -> dict[str, Run]:
    return run(merged, None)


def test_a_plan_that_a_later_policy_needs_drafts_too(drafts, merged, without):
    """vLLM tells once, at the start, which hidden states EAGLE-3 reads."""
    speculative = {"method": "eagle3", "num_speculative_tokens": DRAFTED, **drafts["eagle3"]}
    with engine(merged, "phase", speculative_config=speculative, max_model_len=256) as llm:
        for plan, policy in [*POLICIES.items()][:2]:
            assert "refused" not in change(llm, plan, yaml.safe_load(policy))
            assert llm.reset_prefix_cache()
            found = answers(llm, PROMPTS[:1], **SAMPLING)
            assert_alike(found, without[plan].answers[:1])


@pytest.mark.parametrize("method", rest_full(METHODS, "eagle3"))
def test_tokens_equal_those_without_and_acceptance_is_known_by_plan(method, drafts, merged, without):
    speculative = {"method": method, "num_speculative_tokens": DRAFTED, **drafts[method]}
    with_drafts = (run_by_itself if method == "ngram" else run)(merged, speculative)
    for plan, found in with_drafts.items():
        assert_alike(found.answers, without[plan].answers)
        decode = [p for p in found.passes if p["phase"] == "decode"]
        assert {p["plan"] for p in decode} == {plan}
        assert all(p["max_query_len"] <= 1 + DRAFTED for p in decode)
        assert [p["scheduled_tokens"] for p in found.passes] == [step.tokens for step in found.steps]
        drafted, accepted = sum(s.drafted for s in found.steps), sum(s.accepted for s in found.steps)
        assert 0 <= accepted <= drafted > 0
        if method == "draft_model":
            assert accepted > drafted / 4 and len(found.passes) < len(without[plan].passes)
    different = {str([ids for ids, _ in found.answers]) for found in with_drafts.values()}
    assert len(different) == len(POLICIES), "otherwise the plans were not told apart"


@pytest.mark.full
@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash"])
def test_drafts_are_those_of_stock_vllm(method, drafts, merged):
    """A draft that is loaded wrongly leaves the answers right."""
    speculative = {"method": method, "num_speculative_tokens": DRAFTED, **drafts[method]}
    with drafting(merged, "w4a16", speculative) as (llm, ours):
        found = answers(llm, PROMPTS, **SAMPLING)
    with drafting(merged.parent / "w4a16", None, speculative) as (llm, of_stock):
        assert_alike(found, answers(llm, PROMPTS, **SAMPLING))
    assert ours[:FIRST] == of_stock[:FIRST]
