# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a layer costs is what an evaluation of its plan says; a search writes the policy of the best plan."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from flexquant import cli
from flexquant.documents.yaml_document import to_yaml
from flexquant.evaluation.evaluating import evaluate
from flexquant.evaluation.inputs import Settings, Subject
from flexquant.layers.searching import limit_loss
from flexquant.layers.sensitivity import Study
from flexquant.policy.plans import describe_layers, with_layer
from flexquant.policy.rules import load_policy
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.objectives import Decision, Range
from flexquant.tuning.policy_file import TuningResult
from flexquant.tuning.policy_file import tuned_policy_document as tuned_document
from tests.checkpoints import make_checkpoint
from tests.conftest import STARTS
from tests.pass_times import CROSSED, make_times
from tests.refusals import refused

pytestmark = pytest.mark.engine
LAYERS, SAMPLES, PROMPT, TOKENS = 3, 4, 16, 6
PAIR = ("w8a8", "w4a16")
SETTINGS = Settings((2,), SAMPLES, PROMPT, TOKENS)
# W4A16 decodes one sequence sooner, and eight later.
CHANGING = {"w8a8": ({1: 0.010, 8: 0.010}, {1: 0.001}), "w4a16": ({1: 0.004, 8: 0.020}, {1: 0.003})}
TUNED = {
    "schema": "flexquant.policy/v1",
    "rules": [
        {"when": {"phase": ["prefill", "mixed"]}, "use": "w8a8"},
        {"when": {"phase": "decode", "batch_size": {"max": 4}}, "use": "w4a16"},
        {"use": "w8a8"},
    ],
    "measured": make_times(CHANGING).to_data(),
}
HIGHER, LAST_RAISED = "w8a8 0-2", "w4a16 0-1, w8a8 2"
ONE_APART = """
schema: flexquant.policy/v1
rules:
  - when: {{phase: [prefill, mixed]}}
    use: w8a8
  - use: {{default: {most}, layers: {{"1": {one}}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, ``tuned.yaml``, which has measured times, and the 16-bit model."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "text.txt").write_text(Path(__file__).read_text() * 4)
    (folder / "tuned.yaml").write_text(to_yaml(TUNED))
    make_checkpoint(folder / "16-bit", scheme=None, num_layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def merged(tiny_merged: Any) -> Path:
    return tiny_merged(num_layers=LAYERS) / "merged"


@pytest.fixture(scope="module")
def options(merged: Path, folder: Path) -> list[str]:
    files = ["--text", str(folder / "text.txt"), "--reference", str(folder / "16-bit")]
    numbers = f"--batch-size 2 --samples {SAMPLES} --prompt-tokens {PROMPT} --tokens {TOKENS}"
    return [str(merged), *files, *numbers.split()]


@pytest.fixture(scope="module")
def measuring(options: list[str], folder: Path) -> list[str]:
    return ["sensitivity", *options, "--output", str(folder / "sensitivity")]


@pytest.fixture(scope="module")
def document(measuring: list[str], folder: Path) -> dict[str, Any]:
    """Measure in place of what another study has left."""
    (folder / "sensitivity").mkdir()
    (file := folder / "sensitivity" / "sensitivity.json").write_text('{"kl": {}}')
    assert cli.main([*measuring, "--overwrite"]) == 0
    return json.loads(file.read_text())


def test_every_plan_is_measured_on_every_row(document: dict[str, Any]) -> None:
    alone = [(one,) * LAYERS for one in PAIR]
    places = itertools.product(zip(alone, reversed(PAIR), strict=True), range(LAYERS))
    layered = [with_layer(base, layer, other) for (base, other), layer in places]
    assert document["kl"].keys() == {describe_layers(plan) for plan in (*alone, *layered)}
    assert all(len(rows) == SAMPLES and min(rows) > 0 for rows in document["kl"].values())
    assert len({tuple(rows) for rows in document["kl"].values()}) == len(document["kl"])


def test_table_and_plot_tell_of_every_layer(document: dict[str, Any], folder: Path) -> None:
    table = sorted((folder / "sensitivity" / "sensitivity.md").read_text().splitlines())
    of_layers = [line.split(" | ")[0] for line in table if line[2:3].isdecimal()]
    assert of_layers == [f"| {layer}" for layer in range(LAYERS)]
    assert (folder / "sensitivity" / "sensitivity.png").stat().st_size > 1000


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on(document, measuring, folder, pytestconfig):
    file = folder / "sensitivity" / "sensitivity.json"
    begun = {**document, "kl": {n: rows for n, rows in document["kl"].items() if n != LAST_RAISED}}
    begun["kl"][HIGHER] = [9.0] * SAMPLES
    file.write_text(json.dumps(begun))
    assert cli.main(measuring) == 0
    found = json.loads(file.read_text())["kl"]
    assert found[LAST_RAISED] == pytest.approx(document["kl"][LAST_RAISED], rel=1e-4)
    assert found[HIGHER] == [9.0] * SAMPLES, "it was not measured again"
    before = pytestconfig.stash[STARTS]["engines"]
    assert cli.main(measuring) == 0
    assert pytestconfig.stash[STARTS]["engines"] == before


def test_results_of_another_study_are_kept(document, measuring, folder, capsys):
    file = folder / "sensitivity" / "sensitivity.json"
    before = file.read_bytes()
    assert cli.main([*measuring, "--seed", "3"]) == 2
    assert "has results with other settings, rows; give another --output" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.fixture(scope="module")
def arguments(options: list[str], folder: Path) -> list[str]:
    return ["search", *options, "--policy", str(folder / "tuned.yaml"), "--output", str(folder / "results")]


@pytest.fixture(scope="module")
def searched(arguments: list[str], folder: Path) -> dict[str, float]:
    """Return the KL divergence of every plan that a search for one layer has measured."""
    (folder / "results").mkdir()
    (folder / "results" / "sensitivity.json").write_text('{"kl": {}}')
    assert cli.main([*arguments, "--layers", "1", "--overwrite"]) == 0
    for file in ("searched.yaml", "searched.md", "searched.png"):
        shutil.copy(folder / "results" / file, folder / file)
    return read_kl(folder)


@pytest.fixture(scope="module")
def most(searched: dict[str, float]) -> float:
    """Return a loss between those of the two variants."""
    return (searched["w8a8 0-2"] + searched["w4a16 0-2"]) / 2


def read_kl(folder: Path) -> dict[str, float]:
    document = json.loads((folder / "results" / "sensitivity.json").read_text())
    return {plan: fmean(rows) for plan, rows in document["kl"].items()}


def rows_of(table: Path) -> list[tuple[str, bool]]:
    """Return the plans in a search's table, the fastest first, and whether each is chosen."""
    rows = table.read_text().splitlines()[2:]
    return [(row.split(" | ")[0].removeprefix("| "), "**chosen**" in row) for row in rows]


def chosen_plan(table: Path) -> str:
    (plan,) = [plan for plan, is_chosen in rows_of(table) if is_chosen]
    return plan


@pytest.fixture(scope="module")
def study(merged: Path, folder: Path) -> Study:
    subject = Subject(merged)
    variants = find_variants(subject.checkpoint.merged, None)
    return Study(subject, variants, folder / "text.txt", str(folder / "16-bit"), SETTINGS)


def test_room_for_the_references_numbers_is_asked_for(
    study: Study, merged: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bytes for each token of the vocabulary, after each forced token."""
    least = 4 * SAMPLES * TOKENS * study.subject.vocab_size
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=least - 1))
    measuring = study.measuring(tmp_path / "kl.json", overwrite=False, progress=print)
    with refused("of free disk space"), measuring as (_, measure):
        measure(study.alone()[0])
    with refused("of free disk space"):
        evaluate(merged, folder / "text.txt", reference=folder / "16-bit", settings=SETTINGS)


def test_without_a_reference_the_most_precise_variant_is_it(study: Study, tmp_path: Path) -> None:
    alone = replace(study, reference=None)
    with alone.measuring(tmp_path / "kl.json", overwrite=False, progress=print) as (_, measure):
        most_precise, other = (max(measure(plan)) for plan in alone.alone())
    assert abs(most_precise) < 1e-6 < 1e-3 < other


def limited_rules(study: Study, most: float, folder: Path) -> list[dict[str, Any]]:
    """Return a tuned policy's rules: it decodes up to four sequences in W4A16, losing at most ``most``."""
    decode = (Range(4, "w4a16", (4, 5)), Range(None, "w8a8", None))
    decision = Decision({"decode": decode, "prefill": (Range(None, "w8a8", None),)})
    times = make_times(CROSSED)
    tuned = TuningResult(tuned_document(decision, study.variants, times, "balanced"), decision, times, [])
    file = folder / "results" / "sensitivity.json"
    limited = limit_loss(tuned, study, most, file, overwrite=False, progress=print)
    (folder / "limited.yaml").write_text(to_yaml(limited.document))
    rules, before = limited.document["rules"], tuned.document["rules"]
    assert rules[1:] == before[1:] and rules[0]["when"] == before[0]["when"]
    return rules


@pytest.fixture(scope="module")
def evaluated(searched: dict[str, float], study: Study, most: float, folder: Path, merged: Path) -> Any:
    """Return the mean KL divergence that an evaluation tells, keyed by the name of the policy's file."""
    (decode, *_) = limited_rules(study, most, folder)
    assert decode["use"] not in ("w8a8", "w4a16")
    for one, base in (PAIR, PAIR[::-1]):
        (folder / f"{one}.yaml").write_text(ONE_APART.format(most=base, one=one))
    policies = [str(folder / f"{name}.yaml") for name in ("searched", "limited", *PAIR)]
    asked = {"reference": folder / "16-bit", "policies": policies, "questions": [], "settings": SETTINGS}
    found = evaluate(merged, folder / "text.txt", **asked)
    return {result["policy"]: result["quality"]["mean_kl"] for result in found["results"]}


def test_the_numbers_are_those_of_an_evaluation_of_the_plan(document, evaluated):
    for one, plan in (("w4a16", "w8a8 0, w4a16 1, w8a8 2"), ("w8a8", "w4a16 0, w8a8 1, w4a16 2")):
        assert fmean(document["kl"][plan]) == pytest.approx(evaluated[f"{one}.yaml"], rel=1e-4)


@pytest.mark.full
def test_of_one_layer_the_best_is_chosen(searched: dict[str, float], folder: Path) -> None:
    every = itertools.product(PAIR, repeat=LAYERS)
    plans = [describe_layers(layers) for layers in every if layers.count("w8a8") == 1]
    assert searched[chosen_plan(folder / "searched.md")] == min(searched[plan] for plan in plans)
    assert (folder / "searched.png").stat().st_size > 1000


def test_the_policy_decodes_by_the_plan_where_the_given_one_took_the_lowest(searched, evaluated, folder):
    prompts, small, large = load_policy(str(folder / "searched.yaml")).rules
    assert (prompts.variants, large.variants) == (("w8a8",), ("w8a8",))
    assert small.when.batch_size.max == 4 and set(small.variants) == {"w4a16", "w8a8"}
    chosen = searched[chosen_plan(folder / "searched.md")]
    assert evaluated["searched.yaml"] == pytest.approx(chosen, rel=1e-4)


def test_the_fastest_plan_that_loses_no_more_is_chosen(arguments, most, folder):
    assert cli.main([*arguments, "--max-kl", str(most)]) == 0
    kl, rows = read_kl(folder), rows_of(folder / "results" / "searched.md")
    plan = chosen_plan(folder / "results" / "searched.md")
    assert kl[plan] <= most
    faster = [other for other, _ in rows[: rows.index((plan, True))]]
    assert faster and all(kl[other] > most for other in faster)


def test_the_sequences_whose_time_counts_are_of_the_rule_that_changes(searched, arguments, folder, capsys):
    """For eight sequences W8A8 is the fastest, and no plan is as fast."""
    assert cli.main([*arguments, "--max-slowdown", "0", "--sequences", "8"]) == 0
    assert "chosen: w8a8 0-2; wrote " in capsys.readouterr().out
    rules = load_policy(str(folder / "results" / "searched.yaml")).rules
    assert [rule.variant for rule in rules] == ["w8a8", "w4a16", "w8a8", "w8a8"]


def test_a_tuned_policy_loses_no_more_than_it_may(searched, evaluated, most):
    assert searched["w8a8 0-2"] < evaluated["limited.yaml"] <= most


def test_a_tuned_policy_that_loses_less_stays_as_it_is(searched, study, folder):
    (decode, *_) = limited_rules(study, 2 * searched["w4a16 0-2"], folder)
    assert decode["use"] == "w4a16"


def test_a_loss_that_no_plan_keeps_to_names_the_nearest(searched, arguments, folder, capsys):
    before = (folder / "results" / "searched.yaml").read_bytes()
    assert cli.main([*arguments, "--max-kl", "0"]) == 1
    nearest = min(searched, key=lambda plan: searched[plan])
    assert f"no plan loses at most 0 nats a token; the nearest, {nearest}, loses" in capsys.readouterr().err
    assert (folder / "results" / "searched.yaml").read_bytes() == before


def test_more_layers_than_there_are_is_wrong_usage(arguments, capsys):
    assert cli.main([*arguments, "--layers", str(LAYERS + 1)]) == 2
    assert "the model has 3 layers, not 4; give --layers up to that" in capsys.readouterr().err
