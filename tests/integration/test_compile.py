# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compiled plans: each is compiled once, before serving, and no plan runs what was compiled for another.

Two compile modes. ``DYNAMO_TRACE_ONCE`` is what vLLM makes of its default on a CPU. ``VLLM_COMPILE`` is the
default on GPUs: vLLM's own backend, which splits the graph at attention, compiles the pieces with Inductor
and keeps them on disk, under names that two plans of one model must not share.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.platforms import current_platform

from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import Answers, answers, distance, engine, every_plan_of, take_policy
from tests.integration.live_server import records_of
from tests.policies import rules

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="sets a CPU up to compile as GPUs do anyway"),
]

LAYERED = "{default: w4a16, layers: {0: w8a8}}"
LAYERED_ALWAYS = rules(f"- use: {LAYERED}")
SEVERAL = rules(
    "- {when: {phase: decode, batch_size: {max: 1}}, use: w4a16}",
    "- {when: {phase: prefill, tokens: {max: 40}}, use: w4a16}",
    f"- {{when: {{phase: decode, batch_size: {{max: 2}}}}, use: {LAYERED}}}",
    f"- {{when: {{phase: prefill, tokens: {{max: 80}}}}, use: {LAYERED}}}",
    "- {when: {phase: decode, batch_size: {min: 4}}, use: w4a16}",
    "- use: w8a8",
)
# One token a byte, 30 each: their number alone decides which plans they take.
PROMPTS = [
    *("What is the capital of France?", "The three laws of motion are: "),
    *("def fibonacci(n: int) -> int: ", "Once upon a time, by the sea, "),
]
PLAN = {
    **{(1, "prefill"): "w4a16", (1, "decode"): "w4a16"},
    **{(2, "prefill"): "w8a8+w4a16[1]", (2, "decode"): "w8a8+w4a16[1]"},
    **{(3, "prefill"): "w8a8", (3, "decode"): "w8a8"},
    **{(4, "prefill"): "w8a8", (4, "decode"): "w4a16"},
}
PLANS = set(PLAN.values())
TAGS = {"flexquant-w4a16", "flexquant-w8a8", "flexquant-w8a8_w4a16_1_"}
"""Names of the folders in which vLLM keeps what it compiled for a plan, without the digest at their end."""
TOKENS = 8
FIRST, SECOND = slice(0, 1), slice(1, 2)
"""The first step of decode, which reads what prefill has written."""
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}


class Run(NamedTuple):
    """What is left of an engine that has ended."""

    answers: dict[int, Answers]
    """The answers, keyed by the number of prompts side by side."""
    before_kv_cache: dict[str, int]
    """What vLLM's compilation counter counted until the KV cache was sized."""
    after_kv_cache: dict[str, int]
    """What it counted from then on, generation included."""


@contextmanager
def as_on_a_gpu():
    """Keep vLLM's own compile backend, which the CPU platform takes out of each config."""
    from vllm import EngineArgs
    from vllm.config import CompilationMode

    build = EngineArgs.create_engine_config

    def create_engine_config(*args: Any, **kwargs: Any) -> Any:
        config = build(*args, **kwargs)
        compilation = config.compilation_config
        assert compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE and compilation.backend == "inductor"
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.ir_enable_torch_wrap = True
        compilation.splitting_ops = None
        compilation.set_splitting_ops_for_v1(config.parallel_config.all2all_backend)
        compilation.post_init_cudagraph_sizes()
        # vLLM's pass that undoes version 1 names operators that its CPU library lacks.
        compilation.inductor_compile_config["enable_auto_functionalized_v2"] = True
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineArgs, "create_engine_config", create_engine_config)
        yield


def counts() -> dict[str, int]:
    """Return what vLLM has compiled in this process, and how often Inductor found its code on disk or not."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    found = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
    return {**vars(compilation_counter), **found}


@contextmanager
def counting():
    """Yield two dictionaries: what vLLM compiles until it sizes the KV cache, and what afterwards."""
    from vllm.v1.engine import core

    size_kv_cache, start = core.get_kv_cache_configs, counts()
    before: dict[str, int] = {}
    after: dict[str, int] = {}

    def get_kv_cache_configs(*args: Any) -> Any:
        before.update({name: count - start[name] for name, count in counts().items()})
        return size_kv_cache(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "get_kv_cache_configs", get_kv_cache_configs)
        yield before, after
    after.update({name: count - start[name] - before[name] for name, count in counts().items()})


def answers_by_number(llm: Any) -> dict[int, Answers]:
    """Return the answers to the first 1, 2, 3 and 4 prompts, these side by side."""
    return {n: answers(llm, PROMPTS[:n], max_tokens=TOKENS, ignore_eos=True) for n in (1, 2, 3, 4)}


def run(
    folder: Path,
    cache: Path,
    policy: str | None = None,
    as_gpu: bool = True,
    aot: bool | None = True,
    **options: Any,
) -> Run:
    """Start an engine that keeps what it compiles in ``cache``, and ask it.

    ``as_gpu``: whether it compiles as on a GPU. ``aot``: whether vLLM compiles ahead of time; None leaves it
    to FlexQuant.
    """
    options = {"enforce_eager": False, **SIZES, **options}
    cache.mkdir(exist_ok=True)
    file = cache / "policy.yaml"  # vLLM's keys of compiled code contain its name
    file.write_text(policy or "")
    with (
        pytest.MonkeyPatch.context() as patch,
        as_on_a_gpu() if as_gpu else nullcontext(),
        counting() as (before, after),
    ):
        patch.setenv("VLLM_CACHE_ROOT", str(cache))
        patch.setenv("VLLM_USE_AOT_COMPILE", str(int(bool(aot))))
        if aot is None:
            patch.delenv("VLLM_USE_AOT_COMPILE")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))  # vLLM sets it, and leaves it set
        with engine(folder, str(file) if policy else None, **options) as llm:
            by_number = answers_by_number(llm)
    return Run(by_number, before, after)


def folders_with(file: str, cache: Path) -> set[str]:
    """Return the names of the folders, one a model tag, in which vLLM's backend keeps such a file."""
    found = cache.glob(f"torch_compile_cache/*/rank_0_0/*/{file}")
    return {path.parent.name.rpartition("-")[0] for path in found}


@pytest.fixture(scope="module")
def folder(tiny_merged):
    return tiny_merged(num_layers=2)


class Compiled(NamedTuple):
    """An engine under VLLM_COMPILE that began with a cold cache."""

    several: Run
    routes: list[dict[str, Any]]
    cache: Path
    start_again: Callable[[], Run]


@pytest.fixture(scope="module")
def compiled(folder, tmp_path_factory):
    work = tmp_path_factory.mktemp("VLLM_COMPILE")
    traced = {"flexquant": {"trace": str(work / "routes.jsonl")}}
    start = partial(run, folder / "merged", work / "cache", SEVERAL, **traced)
    return Compiled(start(), records_of(work / "routes.jsonl")[1:], work / "cache", start)


@pytest.fixture(scope="module")
def eager(folder):
    """Return the answers of an engine that does not compile, keyed by its policies."""
    policies = {"several": SEVERAL, "w8a8": "w8a8", "w4a16": "w4a16", "layered": LAYERED_ALWAYS}
    found = {}
    with engine(folder / "merged", every_plan_of([*policies.values()]), **SIZES) as llm:
        for name, policy in policies.items():
            take_policy(llm, policy)
            found[name] = answers_by_number(llm)
    return found


@pytest.fixture(scope="module", params=["eager", pytest.param("compiled", marks=pytest.mark.full)])
def alone(request, eager, folder, tmp_path_factory):
    """Return each plan's answers: from an eager engine, or from compiled ones that have no other plan."""
    if request.param == "eager":
        return {name: found for name, found in eager.items() if name != "several"}
    work = tmp_path_factory.mktemp("alone")
    policies = {"w8a8": None, "w4a16": None, "layered": LAYERED_ALWAYS}
    return {
        name: run(folder / ("merged" if policy else name), work / name, policy).answers
        for name, policy in policies.items()
    }


def test_every_pass_takes_the_policys_plan(compiled):
    assert {(r["sequences"], r["phase"]): r["plan"] for r in compiled.routes} == PLAN
    assert len(compiled.routes) == len(PROMPTS) * TOKENS


@pytest.mark.parametrize(("number", "plan"), [(1, "w4a16"), (2, "layered"), (3, "w8a8")])
def test_a_plan_among_others_computes_what_it_does_alone(compiled, alone, number, plan):
    """After engines with LoRA, Inductor sums otherwise on AVX2."""
    found = compiled.several.answers[number]
    apart = {name: distance(found, answers[number]) for name, answers in alone.items()}
    own = apart.pop(plan)
    assert own < min(apart.values()) / 2, (own, apart)


def test_a_plan_that_takes_over_reads_the_kv_cache_of_the_one_before(compiled, alone, eager):
    switching = compiled.several.answers[4]
    first_of_w8a8, first_of_w4a16 = (distance(switching, alone[name][4], FIRST) for name in ("w8a8", "w4a16"))
    assert first_of_w8a8 < first_of_w4a16 / 2, "prefill is w8a8's"
    to_eager, to_w8a8 = (distance(switching, other[4], SECOND) for other in (eager["several"], alone["w8a8"]))
    assert to_eager < to_w8a8 / 2, "decode is not"


def test_every_plan_is_compiled_before_the_kv_cache_is_sized_and_none_later(compiled):
    assert compiled.several.before_kv_cache["num_aot_compiles"] == len(PLANS)
    # Inductor may compile small functions of vLLM's own later; its counters show these, vLLM's do not.
    later = {name: n for name, n in compiled.several.after_kv_cache.items() if not name.startswith("fxgraph")}
    assert not any(later.values()), later


def test_plans_are_kept_apart_on_disk(compiled):
    assert len([*compiled.cache.glob("torch_compile_cache/torch_aot_compile/*/rank_0_0/model")]) == len(PLANS)
    assert folders_with("computation_graph.py", compiled.cache) == TAGS


def test_a_second_start_loads_every_plan_and_answers_the_same(compiled):
    again = compiled.start_again()
    assert again.answers == compiled.several.answers
    assert again.before_kv_cache["num_aot_artifacts_loaded"] == len(PLANS)
    assert again.before_kv_cache["num_aot_compiles"] == again.before_kv_cache["num_inductor_compiles"] == 0
    assert not any(again.after_kv_cache.values()), again.after_kv_cache


@pytest.mark.full
def test_without_aot_artefacts_each_plan_finds_its_own_pieces(compiled, folder, tmp_path):
    """vLLM then keeps compiled pieces by folder and index, whatever they compute."""
    cold, warm = (run(folder / "merged", tmp_path, SEVERAL, aot=False) for _ in range(2))
    assert cold.answers == warm.answers == compiled.several.answers
    assert folders_with("vllm_compile_cache.py", tmp_path) == TAGS
    pieces = cold.before_kv_cache["num_backend_compilations"]
    assert cold.before_kv_cache["num_graphs_seen"] == len(PLANS)
    assert cold.before_kv_cache["num_cache_entries_updated"] == pieces == 3 * len(PLANS)
    assert warm.before_kv_cache["num_compiled_artifacts_loaded"] == pieces
    assert warm.before_kv_cache["num_inductor_compiles"] == 0
    assert not any(cold.after_kv_cache.values()) and not any(warm.after_kv_cache.values())


@pytest.mark.full
@pytest.mark.parametrize("aot", [True, False])
def test_a_checkpoint_merged_again_with_another_scheme_runs_none_of_the_old_code(aot, tmp_path):
    """The plans keep their names, the folder its own and the last layer its variant: one scheme changes."""
    policy = rules(f"- {{when: {{phase: decode}}, use: {LAYERED}}}", "- use: w4a16")
    merged, w4a16 = tmp_path / "merged", make_checkpoint(tmp_path / "w4a16", scheme="w4a16")
    int8 = make_checkpoint(tmp_path / "int8", scheme="w8a8")
    int4 = make_checkpoint(tmp_path / "int4", scheme="w4a16", group_size=32)

    def answers_of(w8a8: Path, cache: str) -> dict[int, Answers]:
        merge_checkpoints({"w8a8": w8a8, "w4a16": w4a16}, merged, overwrite=True)
        return run(merged, tmp_path / cache, policy, aot=aot).answers

    old = answers_of(int8, "cache")
    again, alone = answers_of(int4, "cache"), answers_of(int4, "another-cache")
    assert again == alone
    assert again != old, "otherwise the line above would show nothing"


@pytest.mark.full
def test_on_a_cpu_every_plan_computes_what_it_does_elsewhere(folder, eager, tmp_path):
    """Under DYNAMO_TRACE_ONCE, a CPU's default. test_compile_state asks which code the next start finds."""
    options = {"as_gpu": False, "aot": None}
    several = run(folder / "merged", tmp_path / "several", SEVERAL, **options)
    assert several.before_kv_cache["fxgraph_cache_miss"] == len(PLANS)
    assert not any(several.after_kv_cache.values()), several.after_kv_cache
    w8a8 = run(folder / "w8a8", tmp_path / "w8a8", **options)
    assert several.answers[3] == w8a8.answers[3]
    for number in (1, 2, 4):
        to_eager, to_w8a8 = (
            distance(several.answers[number], other[number], SECOND)
            for other in (eager["several"], w8a8.answers)
        )
        assert to_eager < to_w8a8 / 2, number
