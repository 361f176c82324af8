# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What an evaluation scores step by step, and its results: table, plot, files whole or as they were."""

import json
import sys
import tempfile
from functools import partial

import numpy as np
import pytest
import torch

from flexquant.cli._arguments import save_plot
from flexquant.errors import FlexQuantError
from flexquant.evaluation.forced_decoding import ForcedRow
from flexquant.evaluation.measure import Scores, summarise_scores
from flexquant.evaluation.report import draw_quality, format_quality_table, write_results
from tests.programs import small_files
from tests.refusals import refused


def make_document(**changes) -> dict:
    scores = Scores(np.ones((2, 2)), np.array([[0.1, 0.2], [0.1, 0.4]]), np.ones((2, 2), dtype=bool))
    quality = summarise_scores(scores, Scores(np.ones((2, 2))))
    run = {"policy": "phase", "batch_size": 2, "prefill_plan": "w8a8", "decode_plan": "w4a16"}
    found = {
        "same_as": None,
        "quality": vars(quality),
        "bytes_per_weight": {"resident": 1.5, "decode": 0.5},
        "answers": {"questions": 3, "identical": 1, "matched": 0.5, "same_as": None},
        "deviations": ["mixed passes were 1 of w8a8, but none were meant"],
    }
    return {"machine": {"cpu": "a CPU", "cores": 2, "gpu": None}, "versions": {"vllm": "0.32.0"}} | {
        "checkpoint": "merged",
        "reference": "model",
        "settings": {"samples": 2, "prompt_tokens": 8, "tokens": 2, "seed": 0, "answer_tokens": 4},
        "text": {"file": "text.txt", "sha256": "0" * 64},
        "questions": 3,
        "results": [run | found | changes],
    }


def test_table_says_numbers_and_warnings():
    table = format_quality_table(make_document())
    header, _, row = table.splitlines()[:3]
    assert [cell.strip() for cell in row.strip("|").split("|")][:3] == ["phase", "2", "w8a8 > w4a16"]
    assert "0.2000 ± 0.0500" in row and "1/3, 50%" in row and "100.0%" in row
    assert "same as" not in header  # a column without content is left out
    assert "Warning: phase, batch 2: mixed passes were 1 of w8a8, but none were meant." in table


def test_a_plot_is_written_or_one_sentence_says_why_there_is_none(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    draw = partial(draw_quality, make_document())
    save_plot(tmp_path / "plot.png", draw)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG") and capsys.readouterr().err == ""
    (tmp_path / "file").write_text("mine")
    save_plot(tmp_path / "file" / "plot.png", draw)
    assert "no plot: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    save_plot(tmp_path / "none.png", draw)
    said = 'no plot: plots need matplotlib; install it with: pip install "flexquant[eval]"'
    assert said in capsys.readouterr().err
    assert not (tmp_path / "none.png").exists()


def test_results_that_cannot_be_written_at_the_end_are_kept_elsewhere(tmp_path, monkeypatch):
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    (tmp_path / "quality.json").mkdir()
    with refused("cannot write .*quality.json .*; the numbers are kept in") as told:
        write_results(make_document(), tmp_path)
    (saved,) = elsewhere.iterdir()
    assert str(saved) in str(told.value) and json.loads(saved.read_text()) == make_document()


def test_results_that_fit_nowhere_leave_no_part_of_themselves(tmp_path, monkeypatch):
    elsewhere = tmp_path / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    with small_files(0), pytest.raises(FlexQuantError, match="nor a temporary file .*the printed table"):
        write_results(make_document(), tmp_path)
    assert list(elsewhere.iterdir()) == [] and list(tmp_path.iterdir()) == [elsewhere]


def test_results_replace_earlier_ones_only_when_they_are_complete(tmp_path):
    (tmp_path / "quality.json").write_text("earlier")
    with pytest.raises(TypeError):
        write_results(make_document(answers=object()), tmp_path)
    assert (tmp_path / "quality.json").read_text() == "earlier"
    write_results(make_document(), tmp_path)
    assert json.loads((tmp_path / "quality.json").read_text()) == make_document()


FORCED = [2, 0, 1]
# Probabilities [step, vocabulary] of the reference and of the policy that is compared with it.
REFERENCE = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.125, 0.125, 0.75]])
POLICY = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]])


def run(row: ForcedRow, probabilities: torch.Tensor) -> list[int]:
    """Take the row through its steps, as vLLM does greedily; return the tokens that it leaves."""
    taken: list[int] = []
    for step in probabilities:
        # Logits are log-probabilities but for a constant.
        taken.append(int(row(taken, step.log() + 3).argmax()))
    return taken


def test_each_step_is_scored_before_its_own_token_is_forced(tmp_path):
    reference = ForcedRow(FORCED, str(tmp_path / "reference.npz"), store_in=str(tmp_path / "stored.npy"))
    assert run(reference, REFERENCE) == FORCED
    policy = ForcedRow(FORCED, str(tmp_path / "policy.npz"), compare_with=str(tmp_path / "stored.npy"))
    assert run(policy, POLICY) == FORCED
    assert np.load(tmp_path / "stored.npy") == pytest.approx(REFERENCE.log().numpy(), abs=1e-6)
    assert np.load(tmp_path / "reference.npz")["nll"] == pytest.approx(-np.log([0.25, 0.25, 0.125]), abs=1e-6)
    compared = np.load(tmp_path / "policy.npz")
    assert compared["nll"] == pytest.approx(-np.log([0.5, 0.5, 0.25]), abs=1e-6)
    kl = (REFERENCE * (REFERENCE / POLICY).log()).sum(dim=1)
    assert compared["kl"] == pytest.approx(kl.numpy(), abs=1e-6)
    backwards = (POLICY * (POLICY / REFERENCE).log()).sum(dim=1)
    assert abs(kl - backwards).max() > 0.01, "otherwise the line above would not tell the two apart"
    assert compared["same_top"].tolist() == [False, False, True]
