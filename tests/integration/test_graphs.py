# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which CUDA graphs are captured, against what vLLM's own dispatchers would replay for every possible pass.

No graph is captured here. vLLM's V1 dispatcher and V2 manager say, from the configuration alone, which sizes
they capture and which of them a pass is padded to; FlexQuant's table says which plans it captures at a size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from vllm import EngineArgs, distributed, envs, forward_context
from vllm.compilation import monitor
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import load_policy
from flexquant.serving.config import ServedPolicy, clip_to_server
from flexquant.serving.worker.graphs import PlanGraphs
from tests.policies import rules

SIZES = [1, 2, 4, 8, 16, 24, 32, 40]
BUDGET = 48
SEQUENCES = 20
"""Sequences between two sizes: decode passes of 17 to 20 are padded beyond the largest FULL decode graph."""

POLICY = rules(
    "- {when: {phase: decode, batch_size: {max: 8}}, use: w4a16}",
    '- {when: {phase: decode}, use: {default: w4a16, layers: {"0": w8a8}}}',
    "- use: w8a8",
)
ANY_PHASE = rules("- {when: {tokens: {max: 8}}, use: w4a16}", "- use: w8a8")
MODES = ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL"]
RUNNERS = ["V1", "V2"]


class PossiblePass(NamedTuple):
    phase: str
    tokens: int
    sequences: int
    uniform: bool
    """Whether the runner takes it for a decode pass; V2 does not take a fresh prompt of one token for one."""


def possible_passes(runner: str, budget: int = BUDGET, speculated: int = 0) -> Iterator[PossiblePass]:
    """Yield the possible passes; ``speculated`` is the most draft tokens of a decoding sequence."""
    one = 1 + speculated
    for n in range(1, SEQUENCES + 1):
        yield PossiblePass("decode", n * one, n, True)
        if runner == "V2":
            yield PossiblePass("decode", n * one, n, False)
        yield from (PossiblePass("decode", tokens, n, False) for tokens in range(n, n * one))
    yield from (PossiblePass("prefill", n, 1, False) for n in range(one + 1, budget + 1))
    yield from (PossiblePass("mixed", n, 2, False) for n in range(one + 2, budget + 1))


def dispatcher(runner: str, config):
    """Return what is captured, as [(mode, size)], and a function: pass -> (mode, size) that it replays."""
    mode = config.compilation_config.cudagraph_mode
    if runner == "V1":
        v1 = CudagraphDispatcher(config)
        v1.initialize_cudagraph_keys(mode, 1)
        captured = [(m, desc.num_tokens) for m, descs in v1.get_capture_descs() for desc in descs]

        def replay(p: PossiblePass):
            found, desc = v1.dispatch(p.tokens, uniform_decode=p.uniform)
            return found, desc.num_tokens

        return captured, replay
    v2 = CudaGraphManager(config, torch.device("cpu"), mode, 1)
    v2._graphs_captured = True
    captured = [(m, desc.num_tokens) for m, descs in v2._capture_descs.items() for desc in descs]

    def replay(p: PossiblePass):
        desc = v2.dispatch(p.sequences, p.tokens, 1 if p.uniform else None, 0)
        return desc.cg_mode, desc.num_tokens

    return captured, replay


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Set up vLLM's process groups, of this process alone; its V2 manager asks them for its rank."""
    with set_current_vllm_config(VllmConfig()):
        meeting = f"file://{tmp_path_factory.mktemp('ranks')}/store"
        distributed.init_distributed_environment(1, 0, meeting, 0, "gloo")
        distributed.initialize_model_parallel()
    yield
    distributed.cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def configured(one_rank, tiny_merged, tmp_path_factory):
    """Return a function: (policy, mode) -> the configuration that a GPU would have, and the route table."""
    policy_file = tmp_path_factory.mktemp("graphs") / "p.yaml"

    def configure(policy: str, mode: str, sizes: list[int] = SIZES, budget: int = BUDGET, **options):
        policy_file.write_text(policy)
        options |= {"additional_config": {"flexquant": {"policy": str(policy_file)}}, "max_model_len": 1024}
        limits = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": budget}
        config = EngineArgs(str(tiny_merged() / "merged"), **limits, **options).create_engine_config()
        compilation = config.compilation_config
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.splitting_ops = list(compilation._attention_ops)
        compilation.cudagraph_mode = CUDAGraphMode[mode]
        compilation.cudagraph_capture_sizes = sizes
        compilation.max_cudagraph_capture_size = sizes[-1]
        merged = MergedConfig.from_json(config.model_config.hf_config.quantization_config)
        return config, clip_to_server(config, merged, ServedPolicy.from_vllm(config)).routes

    return configure


@pytest.fixture(autouse=True)
def graph_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the memory pool that the V2 manager asks for and a CPU lacks; nothing is put into it."""
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", (0, 0), raising=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_no_graph_is_missing_and_the_plan_is_the_policys(runner, mode, configured):
    config, routes = configured(ANY_PHASE if mode == "FULL" else POLICY, mode)
    captured, replay = dispatcher(runner, config)
    graphs = set()
    for kind, size in captured:
        if kind == CUDAGraphMode.FULL:
            phase = "prefill" if mode == "FULL" else "decode"
            graphs.add((kind, size, routes.lookup(phase, size)))
        else:
            graphs |= {(kind, size, plan) for plan in routes.reachable(size)}
    replayed = set()
    for p in possible_passes(runner):
        kind, size = replay(p)
        if kind != CUDAGraphMode.NONE:
            replayed.add((kind, size, routes.lookup(p.phase, size)))
        else:
            assert size == p.tokens
    assert replayed <= graphs
    # V1 never replays a decode plan in pieces where it has a FULL graph of the size. All others are used.
    assert not {graph for graph in graphs - replayed if (CUDAGraphMode.FULL, *graph[1:]) not in graphs}
    if runner == "V2":
        assert replayed == graphs


def test_mode_full_is_refused_for_a_policy_that_tells_phases_apart(configured):
    said = "cudagraph_mode FULL, .* tells phases apart .*FULL_AND_PIECEWISE"
    with pytest.raises(FlexQuantError, match=said):
        configured(POLICY, "FULL")


def test_breakable_graphs_are_refused_for_a_policy_that_loads_several_variants(configured, monkeypatch):
    """A later policy could give their sizes another plan, and they would replay the one before."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    envs.disable_envs_cache()
    configured(rules("- use: w8a8"), "PIECEWISE")
    for policy in (ANY_PHASE, POLICY, to_yaml(load_policy("w8a8-from-int4").document)):
        with pytest.raises(FlexQuantError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=0"):
            configured(policy, "PIECEWISE")


@pytest.mark.parametrize(
    ("runner", "sizes", "adjusted", "speculated"),
    [
        # 20 sequences of 4 tokens fill a size of 80, and those in between are padded to 512.
        ("V1", [32, 512], None, 3),
        ("V2", [32, 512], None, 3),
        # 20 sequences of 3 tokens are padded to 61; the V1 runner, with FULL graphs, makes 63 of that later.
        ("V1", [32, 61, 128], [33, 63], 2),
    ],
)
def test_sizes_are_tokens_also_where_several_are_decoded(runner, sizes, adjusted, speculated, configured):
    """Sizes that vLLM rounds up for speculation are in the table."""
    drafts = {"method": "ngram", "num_speculative_tokens": speculated, "prompt_lookup_max": 3}
    mode, budget = "FULL_AND_PIECEWISE" if adjusted else "PIECEWISE", sizes[-1]
    config, routes = configured(POLICY, mode, sizes=sizes, budget=budget, speculative_config=drafts)
    if adjusted:
        config.compilation_config.adjust_cudagraph_sizes_for_spec_decode(1 + speculated)
        assert config.compilation_config.cudagraph_capture_sizes == adjusted
    _, replay = dispatcher(runner, config)
    for p in possible_passes(runner, budget=budget, speculated=speculated):
        kind, size = replay(p)
        assert adjusted or kind == CUDAGraphMode.PIECEWISE
        if kind == CUDAGraphMode.PIECEWISE:
            assert routes.lookup(p.phase, size) in routes.reachable(size), p


class Entries(dict):
    """A wrapper's graphs, keyed by size, which count how often they are asked."""

    asked = 0

    def __contains__(self, descriptor: object) -> bool:
        Entries.asked += 1
        return super().__contains__(descriptor)


class Plan(torch.nn.Module):
    """Returns the mode in which it runs."""

    def forward(self) -> CUDAGraphMode:
        return forward_context.get_forward_context().cudagraph_runtime_mode


@pytest.fixture
def captured(configured, monkeypatch):
    """Return a plan of 30 pieces, the last with a graph for 8 tokens, after vLLM has ended capturing."""
    config, _ = configured(POLICY, "PIECEWISE")
    graphs = PlanGraphs()
    with graphs.compiling("plan"):
        pieces = [CUDAGraphWrapper(Plan(), config, CUDAGraphMode.PIECEWISE) for _ in range(30)]
    size = forward_context.BatchDescriptor(num_tokens=8)
    for piece in pieces:
        piece.concrete_cudagraph_entries = Entries()
    pieces[-1].concrete_cudagraph_entries[size] = CUDAGraphEntry(size)
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", False)
    yield graphs
    assert pieces  # keeps the pieces alive: vLLM holds them weakly


def replay_one(graphs: PlanGraphs, tokens: int) -> CUDAGraphMode:
    size = forward_context.BatchDescriptor(num_tokens=tokens)
    asked = {"cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE, "batch_descriptor": size}
    context = forward_context.ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={}, **asked)
    with forward_context.override_forward_context(context):
        graphs.capture_missing({"plan": Plan()}, ["plan"], context, {})
        return graphs.replay("plan", Plan(), context, {})


def test_a_pass_in_serving_asks_one_piece_for_its_graph(captured):
    assert replay_one(captured, 8) == CUDAGraphMode.PIECEWISE
    Entries.asked = 0
    assert replay_one(captured, 8) == CUDAGraphMode.PIECEWISE
    assert Entries.asked == 1


def test_a_size_without_graphs_runs_without_instead_of_capturing_while_serving(captured):
    assert replay_one(captured, 16) == CUDAGraphMode.NONE
