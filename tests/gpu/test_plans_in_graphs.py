# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every graph holds the plan of the policy, all are there before the first request, and nothing moves."""

import pytest
from vllm.compilation.counter import compilation_counter

from tests.gpu.conftest import ON_GPU, RUNNERS, SEQUENCES, SIZES, graph_engine
from tests.integration.conftest import answers, every_plan_of, take_policy
from tests.policies import rules

MODES = ["PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
BY_BATCH = rules(
    "- {when: {phase: decode, batch_size: {max: 4}}, use: w4a16}",
    "- {when: {phase: decode, batch_size: {max: 8}}, use: w8a8}",
    "- {when: {phase: decode}, use: w4a16}",
    "- use: w8a8",
)
OPPOSITE_OF_BY_BATCH = rules(
    "- {when: {phase: decode, batch_size: {max: 4}}, use: w8a8}",
    "- {when: {phase: decode, batch_size: {max: 8}}, use: w4a16}",
    "- use: w8a8",
)
BY_SIZE = rules("- {when: {tokens: {max: 4}}, use: w4a16}", "- use: w8a8")
OPPOSITE_OF_BY_SIZE = rules("- {when: {phase: decode, batch_size: {min: 5}}, use: w4a16}", "- use: w8a8")
DERIVE = "derive: {from-int4: {from: w4a16, activations: int8, weights: int8}}\nrules:"
ONE_COPY, OPPOSITE_OF_ONE_COPY = (
    policy.replace("use: w4a16", "use: from-int4").replace("rules:", DERIVE)
    for policy in (BY_BATCH, OPPOSITE_OF_BY_BATCH)
)
IN_SOFTWARE = [] if ON_GPU else pytest.mark.full
"""Without a GPU, test_replays reads what graphs hold."""
FAR = 0.5
"""Least nats between the two variants' logprobs; a compiled plan is nearer to the same plan run eagerly."""


def second_steps(llm) -> list[dict[int, float]]:
    """Return, for every batch size, the first sequence's logprobs of the second token, in one decode pass."""
    batches = [[f"{i} prompt" for i in range(n)] for n in range(1, SEQUENCES + 1)]
    return [answers(llm, b, max_tokens=2, ignore_eos=True, logprobs=20)[0][1][1] for b in batches]


def distance(a: dict[int, float], b: dict[int, float]) -> float:
    """Return the largest difference in logprob over the tokens that both list; infinity if there are none."""
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=float("inf"))


def parameter_addresses(model) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def sizes_of_pieces(model) -> dict[str, list[int]]:
    """Return, for every plan, the sizes for which its first piece holds a captured graph."""
    found = {}
    for plan, wrappers in model.graphs._wrappers.items():
        for piece in wrappers[:1]:
            entries = piece.concrete_cudagraph_entries.items()
            found[plan] = sorted(size.num_tokens for size, entry in entries if entry.cudagraph is not None)
    return found


def expected_sizes(model) -> dict[str, list[int]]:
    plans = {plan.name: [] for plan in model.routes.plans}
    for size in SIZES:
        for plan in model.routes.reachable(size):
            plans[plan.name].append(size)
    return plans


def unwrap(function):
    """Unwrap the model for ``function``: the V1 runner wraps it for FULL graphs."""
    return lambda model: function(model.unwrap() if hasattr(model, "unwrap") else model)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("mode", "policy", "opposite"),
    [
        *(
            pytest.param(mode, BY_BATCH, OPPOSITE_OF_BY_BATCH, id=f"{mode}-by-batch", marks=IN_SOFTWARE)
            for mode in MODES
        ),
        pytest.param("FULL", BY_SIZE, OPPOSITE_OF_BY_SIZE, id="FULL-by-size", marks=IN_SOFTWARE),
        pytest.param("FULL_AND_PIECEWISE", ONE_COPY, OPPOSITE_OF_ONE_COPY, id="one-copy"),
    ],
)
def test_plan_at_every_batch_size_is_the_policys(runner, mode, policy, opposite, checkpoints):
    folder = checkpoints / "apart"
    # vLLM (0.26) captures FULL graphs of prompts as if every sequence had one token, for which FlashAttention
    # 3 drops the causal mask: see benchmarks/results/llama-3.1-8b-h100/gpu-tests.md.
    options = {"attention_backend": "TRITON_ATTN"} if mode == "FULL" else {}
    with graph_engine(folder, runner, mode, policy, **options) as llm:
        captured = compilation_counter.num_cudagraph_captured
        addresses = llm.apply_model(parameter_addresses)
        pieces, expected = (llm.apply_model(unwrap(of))[0] for of in (sizes_of_pieces, expected_sizes))
        found = second_steps(llm)
        answers(llm, ["a prompt of more tokens than the largest captured size holds, in bytes " * 3])
        assert compilation_counter.num_cudagraph_captured == captured > 0
        assert llm.apply_model(parameter_addresses) == addresses
    if "PIECEWISE" in mode:
        assert pieces == expected
    alone = []
    with graph_engine(folder, runner, None, every_plan_of([policy, opposite]), **options) as llm:
        for each in (policy, opposite):
            take_policy(llm, each)
            alone.append(second_steps(llm))
    eager, wrong = alone
    for n in range(SEQUENCES):
        padded = next(size for size in SIZES if size > n)
        assert distance(found[n], eager[n]) < FAR < distance(found[n], wrong[n]), (n + 1, padded)


@pytest.mark.parametrize("runner", RUNNERS)
def test_vllms_own_passes_run_every_plan_that_their_size_can_take(runner, checkpoints):
    ran = []
    with graph_engine(checkpoints / "apart", runner, None, BY_BATCH) as llm:
        (model,) = llm.apply_model(lambda model: model)
        for name, plan in model.plans.items():
            plan.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        # As vLLM warms attention up and tunes kernels, for which it describes sequences.
        described = {"force_attention": True, "create_mixed_batch": True} if runner == "V1" else {}
        described["is_profile"] = True
        for size in (16, 3):
            llm.collective_rpc(lambda w, size=size: w.model_runner._dummy_run(size, **described))
            ran.append("")
        answers(llm, ["a prompt"], max_tokens=2)
    first, second, served = " ".join(name or "|" for name in ran).split("|")
    assert set(first.split()) == set(second.split()) == {"w8a8", "w4a16"}
    assert served.split() == ["w8a8", "w4a16"]
