# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two tensor-parallel ranks: each finds the same routes by itself; a pure plan is the static checkpoint.

As processes of vLLM's own, and as Ray's actors.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.platforms import current_platform

from flexquant.evaluation.engine import change_policy, take_policy
from flexquant.merge import merge_checkpoints, split_checkpoint
from flexquant.policy.rules import load_policy
from tests.checkpoints import EXPERTS, MIXTURES, make_checkpoint
from tests.conftest import rest_full
from tests.integration.conftest import Answers, distance, engine
from tests.integration.test_compile import SIZES, answers_by_number
from tests.integration.two_ranks import engine_on, needs_two_cores, run, run_several
from tests.policies import rules
from tests.rotations import make_rotated
from tests.states import make_variants, merge_twins

pytestmark = needs_two_cores
RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module", params=rest_full(("llama", "qwen2", "qwen3_moe"), "llama"))
def folder(request, tiny_merged):
    """Return a folder with both variants and the merged checkpoint."""
    return tiny_merged(request.param, 2, (EXPERTS,) if request.param in MIXTURES else ())


@pytest.fixture(scope="module")
def several(folder, tmp_path_factory):
    work = tmp_path_factory.mktemp("several")
    return run_several(folder / "merged", RANKS, work, finish=change_on_the_way)


def change_on_the_way(llm: Any) -> list[Any]:
    """Change the policy in the middle of two answers of 8 tokens; return what the ranks tell."""
    core = llm.llm_engine
    for number in range(2):
        core.add_request(str(number), "a prompt", SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(4):
        core.step()
    told = change_policy(llm, "another", load_policy("w8a8").document)
    while core.has_unfinished_requests():
        core.step()
    return told


def test_both_ranks_take_the_policys_routes(several):
    several.check_routes()


@pytest.mark.parametrize(
    ("variant", "number"), [pytest.param("w4a16", 1, marks=pytest.mark.full), ("w8a8", 3)]
)
def test_pure_plans_equal_the_static_checkpoints(variant, number, folder, several):
    static = run(folder / variant, RANKS)
    assert several.answers[number] == static[number]
    assert several.answers[2] != static[2], "which the layered plan answered"


def test_both_ranks_take_another_policy_between_the_same_two_passes(several):
    assert several.told == [several.told[0]] * 2 and several.told[0]["routes"]
    plans = [record.get("plan", "another policy") for record in several.after]
    assert plans == ["w4a16", *["w8a8+w4a16[1]"] * 3, "another policy", *["w8a8"] * 4]


def run_each(folder: Path, policies: Sequence[str], started: str = "phase") -> list[dict[int, Answers]]:
    """Return the answers on two ranks under each policy; ``started`` is one that has all their plans."""
    found = []
    with engine_on(folder, RANKS, started) as llm:
        for policy in policies:
            take_policy(llm, policy, load_policy(policy).document)
            assert llm.reset_prefix_cache()
            found.append(answers_by_number(llm))
    return found


def test_each_rank_computes_int8_weights_from_its_part_of_one_copy(tiny_merged):
    """Each rank rounds its own part of a row, so that the answers are near to one rank's, not equal."""
    published = tiny_merged("llama", num_layers=2) / "w4a16"
    in_int8, in_int4 = run_each(published, ("w8a8-from-int4", "w4a16"), "one-copy")
    with engine(published, "w8a8-from-int4", **SIZES) as llm:
        on_one = answers_by_number(llm)
    for number, answers in in_int8.items():
        assert distance(answers, on_one[number]) < 0.06
        assert distance(answers, in_int4[number]) > 0.005


@pytest.mark.full
def test_each_rank_rounds_its_part_of_16_bit_weights(tiny_merged, tmp_path):
    folder = make_checkpoint(tmp_path / "model", scheme=None)
    policies = "int8-from-16-bit", "prefill-8-bit", None
    in_int8, in_16_bit, stock = (run(folder, RANKS, policy) for policy in policies)
    with engine(folder, "int8-from-16-bit", **SIZES) as llm:
        on_one = answers_by_number(llm)
    for number, answers in in_int8.items():
        assert in_16_bit[number] == stock[number]
        assert distance(answers, on_one[number]) < 0.06
        assert distance(answers, stock[number]) > 0.001


@pytest.mark.full
def test_each_rank_corrects_its_part_of_nested_weights(tiny_merged, tmp_path):
    sources = tiny_merged("llama", num_layers=2)
    merge_checkpoints({name: sources / name for name in ("w8a8", "w4a16")}, tmp_path / "both", nested="near")
    split_checkpoint(tmp_path / "both", "w8a8", tmp_path / "split")
    in_int8, in_int4 = run_each(tmp_path / "both", ("w8a8", "w4a16"))
    with engine(tmp_path / "split", **SIZES) as llm:
        stock = answers_by_number(llm)
    for number, answers in in_int8.items():
        assert distance(answers, stock[number]) < 0.03 < distance(in_int4[number], stock[number])


@pytest.mark.full
def test_each_rank_rotates_its_blocks_of_inputs(tmp_path):
    """Each rank rounds its part of W8A8's activations: the answers are near to one rank's, not equal."""
    sources = {scheme: make_rotated(tmp_path / scheme, scheme) for scheme in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged")
    for policy, on_two in zip(sources, run_each(tmp_path / "merged", [*sources]), strict=True):
        with engine(tmp_path / "merged", policy, **SIZES) as llm:
            on_one = answers_by_number(llm)
        for number, answers in on_two.items():
            assert distance(answers, on_one[number]) < 0.03


@pytest.mark.full
def test_each_rank_rounds_its_rows_of_the_head(folder, several, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(rules("- use: w8a8") + "head: int8\n")
    in_int8 = run(folder / "merged", RANKS, str(policy))
    assert 0.001 < distance(in_int8[3], several.answers[3]) < 0.01, "both are w8a8's"


@pytest.mark.full
def test_a_variant_goes_on_from_the_state_that_another_wrote(tmp_path):
    """Each rank has its part of the state."""
    merged = merge_twins(make_variants(tmp_path, "qwen3_next"))
    assert run(merged, RANKS) == run(tmp_path / "w8a8", RANKS)


def offer_cores() -> None:
    """Have vLLM take what Ray calls GPUs for its CPU platform's devices, for which Ray has no name.

    vLLM refuses Ray on CPUs only for lack of that name. Delete when its CPU platform has a
    ``ray_device_key``.
    """
    from vllm.platforms.cpu import CpuPlatform

    assert not CpuPlatform.ray_device_key
    CpuPlatform.ray_device_key = "GPU"


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="`make test-full` installs it")
    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = {"worker_process_setup_hook": offer_cores, "env_vars": paths}
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, runtime_env=workers)
    yield
    ray.shutdown()


@pytest.mark.full
def test_rays_actors_take_the_policys_routes_and_answer_alike(folder, several, two_devices, tmp_path):
    actors = run_several(folder / "merged", RANKS, tmp_path, "ray")
    actors.check_routes()
    assert actors.answers == several.answers
