# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The benchmark of whole answers, on a random model: every policy answers the same tasks on one engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generation.__main__ import main
from flexquant.evaluation.engine import describe_machine, describe_versions
from flexquant.evaluation.evaluating import REFERENCE
from tests.checkpoints import make_checkpoint
from tests.conftest import STARTS

pytestmark = [pytest.mark.engine, pytest.mark.full]

POLICIES = ["w8a8", "w4a16", "phase", "phase-batch"]
TASKS = {"arithmetic": 4, "instructions": 3, "long": 2}
TOKENS = ["--answer-tokens", "6", "--long-tokens", "8"]
AGAIN = f"{REFERENCE}, batches of 1"


@pytest.fixture(scope="module")
def arguments(tiny_merged: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, merged = tmp_path_factory.mktemp("generation"), tiny_merged(num_layers=2) / "merged"
    reference = make_checkpoint(folder / "16-bit", scheme=None, num_layers=2)
    numbers = [part for kind, number in TASKS.items() for part in (f"--{kind}", str(number))]
    files = ["--output", str(folder / "results.json"), "--answers", str(folder / "answers.jsonl")]
    options = ["--policies", ",".join(POLICIES), "--batch-size", "2", *TOKENS]
    return [str(merged), "--reference", str(reference), *numbers, *files, *options]


@pytest.fixture(scope="module")
def run(arguments, pytestconfig) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Run the benchmark; return its document, its answers, and how many engines it started."""
    before = pytestconfig.stash[STARTS]["engines"]
    assert main(arguments) == 0
    folder = Path(arguments[arguments.index("--output") + 1]).parent
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    document = json.loads((folder / "results.json").read_text())
    return document, answers, pytestconfig.stash[STARTS]["engines"] - before


@pytest.fixture(scope="module")
def results(run: Any) -> dict[str, Any]:
    return {result["policy"]: result for result in run[0]["results"]}


def test_all_policies_answer_on_one_engine_after_the_reference(run: Any) -> None:
    document, answers, engines = run
    names = [result["policy"] for result in document["results"]]
    assert engines == 2 and names == [REFERENCE, AGAIN, *POLICIES]
    assert [list(line["answers"]) for line in answers] == [names] * sum(TASKS.values())


def test_the_passes_are_those_of_the_policy(results: dict[str, Any]) -> None:
    batches, taken = 2 + 2 + 1, {"w8a8": ("w8a8", "w8a8"), "w4a16": ("w4a16", "w4a16")}
    for name, (prefill, decode) in (taken | {"phase": ("w8a8", "w4a16")}).items():
        passes = results[name]["passes"]
        assert passes["prefill"] == {prefill: batches} and set(passes["decode"]) == {decode}


def test_equal_routes_are_answered_once(results: dict[str, Any]) -> None:
    assert [results[name]["same_as"] for name in POLICIES] == [None, None, None, "phase"]
    assert results["phase-batch"]["kinds"] == results["phase"]["kinds"]


def test_every_kind_is_counted_and_compared(results: dict[str, Any]) -> None:
    for name, result in results.items():
        for kind in ("arithmetic", "instructions"):
            found = result["kinds"][kind]
            assert found["of"] == len(found["each"]) == TASKS[kind]
            assert found["right"] == found["each"].count("1") <= TASKS[kind] - found["empty"]
            assert sum(number for _, number in found["families"].values()) == TASKS[kind]
        assert result["kinds"]["long"]["tokens"] <= 8 * TASKS["long"]
        others = {REFERENCE: [], AGAIN: [REFERENCE], "w8a8": [REFERENCE]}.get(name, [REFERENCE, "w8a8"])
        assert list(result["against"]) == others
        for against in result["against"].values():
            assert len(against["long"]["at"]) == TASKS["long"]


def test_the_prefill_of_phase_gives_w8a8s_first_token(results: dict[str, Any]) -> None:
    at = results["phase"]["against"]["w8a8"]["long"]["at"]
    assert all(token is None or token > 1 for token in at)


def test_the_document_says_where_it_comes_from(run: Any) -> None:
    document = run[0]
    assert (document["machine"], document["versions"]) == (describe_machine(), describe_versions())
    assert document["argv"][:3] == ["python", "-m", "benchmarks.generation"]
    assert document["settings"]["batch_size"] == 2
    assert document["prompts"] == "plain text", "the model has no chat template"


def test_a_context_that_is_too_short_is_refused_before_any_engine(arguments, capsys, pytestconfig):
    before = pytestconfig.stash[STARTS]["engines"]
    assert main([*arguments, "--long-tokens", "2048"]) == 1
    assert "max_position_embeddings is 2048; lower --long-tokens (2048)" in capsys.readouterr().err
    assert pytestconfig.stash[STARTS]["engines"] == before
