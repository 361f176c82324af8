# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The benchmarks of decoding end to end, on a small random model: plans, triggers, operators, own time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import layered_plans, own_time, trigger, where_time_goes
from flexquant.policy.plans import all_in, describe_layers, with_layer
from tests.integration.test_search import LAYERS, write_tuned_and_reference

pytestmark = [pytest.mark.engine, pytest.mark.full]

SAMPLES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    source = Path(__file__).read_text() * 8
    (folder / "one.txt").write_text(source[: len(source) // 2])
    (folder / "other.txt").write_text(source[len(source) // 2 :])
    write_tuned_and_reference(folder)
    return folder


@pytest.fixture(scope="module")
def merged(tiny_merged: Any) -> Path:
    return tiny_merged(num_layers=LAYERS) / "merged"


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def test_layered_plans_are_chosen_on_one_text_and_measured_on_another(
    monkeypatch: pytest.MonkeyPatch, folder: Path, merged: Path
) -> None:
    output = folder / "layered"
    files = ["--text", folder / "one.txt", "--unseen", folder / "other.txt", "--reference", folder / "16-bit"]
    files += ["--policy", folder / "tuned.yaml", "--output", output]
    numbers = ["--batch-size", 2, "--samples", SAMPLES, "--prompt-tokens", 16, "--tokens", 6, "--layers", 1]
    run(monkeypatch, layered_plans, merged, *files, *numbers)
    document = json.loads((output / "layered.json").read_text())
    plans = {plan["chosen_by"]: plan for plan in document["plans"]}
    assert plans["w8a8"]["plan"] == describe_layers(all_in("w8a8", LAYERS))
    chosen_on = json.loads((output / "sensitivity.json").read_text())["kl"]
    lowest = all_in("w4a16", LAYERS)
    one_raised = [describe_layers(with_layer(lowest, layer, "w8a8")) for layer in range(LAYERS)]
    assert plans["searched, 1"]["plan"] == min(one_raised, key=lambda plan: sum(chosen_on[plan]))
    assert all(len(plan["kl"]) == SAMPLES and plan["ms"] > 0 for plan in plans.values())
    assert document["text"]["file"] == "other.txt" and document["chosen_on"] == "one.txt"
    assert (output / "layered.png").stat().st_size > 1000


def test_as_many_passes_as_a_trigger_raises(
    monkeypatch: pytest.MonkeyPatch, folder: Path, merged: Path
) -> None:
    chosen = {"entropy": {"signal": "entropy", "aggregate": "max", "enter": 4.5}}
    monkeypatch.setattr(trigger, "TRIGGERS", chosen)
    files = ["--text", folder / "one.txt", "--reference", folder / "16-bit"]
    output = folder / "trigger.json"
    run(monkeypatch, trigger, merged, *files, "--samples", SAMPLES, "--tokens", 9, "--output", output)
    document = json.loads(output.read_text())
    assert document["passes"] == SAMPLES * 8
    assert set(document["raised"]) == {"entropy"}
    names = {"entropy", "entropy, evenly", *(f"entropy, random {n}" for n in (1, 2, 3)), "phase", "w8a8"}
    assert names < set(document["quality"])


def test_operators_account_for_a_pass(monkeypatch: pytest.MonkeyPatch, folder: Path, merged: Path) -> None:
    output = folder / "operators.json"
    options = ["--policies", "w8a8", "--sequences", 1, 2, "--output", output]
    run(monkeypatch, where_time_goes, merged, *options)
    ((_, document),) = json.loads(output.read_text()).items()
    found = document["policies"]["w8a8"]
    assert found["kernels"]["w8a8"]
    for sequences in ("1", "2"):
        operators = found["sequences"][sequences]["operators"]
        assert found["sequences"][sequences]["pass_ms"] > 0
        assert sum(operators.values()) > 0 and "other operators" in operators


def test_a_millisecond_in_flexquants_own_python_is_found(
    monkeypatch: pytest.MonkeyPatch, folder: Path, merged: Path
) -> None:
    """Time that a plan takes does not count, and time around it does."""
    from flexquant.serving.worker.pass_records import PassRecords

    def medians(name: str) -> dict[str, float]:
        run(monkeypatch, own_time, merged, "--requests", 9, "--output", folder / name)
        own = json.loads((folder / name).read_text())["own"]
        assert own["decode"]["calls"]["median"] == own["prefill"]["calls"]["median"] > 10
        return {phase: own[phase]["us"]["median"] for phase in own}

    before, serve = medians("own.json"), PassRecords.serve

    def slow(records: PassRecords, *args: Any) -> None:
        time.sleep(0.001)
        serve(records, *args)

    monkeypatch.setattr(PassRecords, "serve", slow)
    after = medians("own-delayed.json")
    assert all(after[phase] > before[phase] + 500 for phase in before)
