# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a layer costs, measured plan by plan on one engine, is what an evaluation of each plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexquant import cli
from flexquant.evaluation.evaluating import evaluate
from flexquant.evaluation.inputs import Settings
from flexquant.policy.plans import describe_layers, with_layer
from tests.checkpoints import make_checkpoint
from tests.conftest import STARTS

pytestmark = pytest.mark.engine
LAYERS = 3
HIGHER, LAST_RAISED = "w8a8 0-2", "w4a16 0-1, w8a8 2"
NUMBERS = {"batch_size": 2, "samples": 4, "prompt_tokens": 16, "tokens": 6}
POLICY = """
schema: flexquant.policy/v1
rules:
  - when: {{phase: [prefill, mixed]}}
    use: w8a8
  - use: {{default: {most}, layers: {{"1": {one}}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sensitivity")


@pytest.fixture(scope="module")
def merged(tiny_merged: Any) -> Path:
    return tiny_merged(num_layers=LAYERS) / "merged"


@pytest.fixture(scope="module")
def arguments(merged: Path, folder: Path) -> list[str]:
    (folder / "text.txt").write_text(Path(__file__).read_text() * 4)
    reference = make_checkpoint(folder / "16-bit", scheme=None, num_layers=LAYERS)
    numbers = [part for name, n in NUMBERS.items() for part in (f"--{name.replace('_', '-')}", str(n))]
    options = ["--text", str(folder / "text.txt"), "--reference", str(reference), *numbers]
    return [str(merged), "--output", str(folder / "results"), *options]


@pytest.fixture(scope="module")
def document(arguments: list[str], folder: Path) -> dict[str, Any]:
    assert cli.main(["sensitivity", *arguments]) == 0
    return json.loads((folder / "results" / "sensitivity.json").read_text())


def test_every_plan_is_measured_on_every_row(document: dict[str, Any]) -> None:
    alone = [("w8a8",) * LAYERS, ("w4a16",) * LAYERS]
    layered = [
        with_layer(base, layer, other)
        for base, other in zip(alone, ("w4a16", "w8a8"), strict=True)
        for layer in range(LAYERS)
    ]
    assert document["kl"].keys() == {describe_layers(plan) for plan in (*alone, *layered)}
    assert all(len(rows) == NUMBERS["samples"] and min(rows) > 0 for rows in document["kl"].values())
    assert len({tuple(rows) for rows in document["kl"].values()}) == len(document["kl"])


@pytest.mark.parametrize(
    ("name", "most", "one"),
    [("w8a8 0, w4a16 1, w8a8 2", "w8a8", "w4a16"), ("w4a16 0, w8a8 1, w4a16 2", "w4a16", "w8a8")],
)
def test_the_numbers_are_those_of_an_evaluation_of_the_plan(
    document: dict[str, Any], folder: Path, merged: Path, name: str, most: str, one: str
) -> None:
    policy = folder / f"{one}-in-the-middle.yaml"
    policy.write_text(POLICY.format(most=most, one=one))
    settings = Settings((2,), NUMBERS["samples"], NUMBERS["prompt_tokens"], NUMBERS["tokens"])
    found = evaluate(
        merged,
        folder / "text.txt",
        reference=folder / "16-bit",
        policies=[str(policy)],
        questions=[],
        settings=settings,
    )
    (result,) = [result for result in found["results"] if result["policy"] == policy.name]
    assert sum(document["kl"][name]) / NUMBERS["samples"] == pytest.approx(
        result["quality"]["mean_kl"], rel=1e-4
    )


def test_table_and_plot_tell_of_every_layer(document: dict[str, Any], folder: Path) -> None:
    table = (folder / "results" / "sensitivity.md").read_text()
    assert [line.split(" | ")[0] for line in sorted(table.splitlines()) if line[2:3].isdecimal()] == [
        f"| {layer}" for layer in range(LAYERS)
    ]
    assert (folder / "results" / "sensitivity.png").stat().st_size > 1000


def test_a_run_that_was_stopped_goes_on(
    document: dict[str, Any], arguments: list[str], folder: Path, pytestconfig: pytest.Config
) -> None:
    file = folder / "results" / "sensitivity.json"
    begun = {**document, "kl": {n: rows for n, rows in document["kl"].items() if n != LAST_RAISED}}
    begun["kl"][HIGHER] = [9.0] * NUMBERS["samples"]
    file.write_text(json.dumps(begun))
    assert cli.main(["sensitivity", *arguments]) == 0
    found = json.loads(file.read_text())["kl"]
    assert found[LAST_RAISED] == pytest.approx(document["kl"][LAST_RAISED], rel=1e-4)
    assert found[HIGHER] == [9.0] * NUMBERS["samples"], "it was not measured again"
    before = pytestconfig.stash[STARTS]["engines"]
    assert cli.main(["sensitivity", *arguments]) == 0
    assert pytestconfig.stash[STARTS]["engines"] == before


def test_results_of_another_study_are_kept(
    document: dict[str, Any], arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "results" / "sensitivity.json").read_bytes()
    assert cli.main(["sensitivity", *arguments, "--seed", "3"]) == 2
    assert "has results with other settings; give another --output, or --overwrite" in capsys.readouterr().err
    assert (folder / "results" / "sensitivity.json").read_bytes() == before
