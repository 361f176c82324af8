# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""examples/05_lm_eval.py runs tasks of lm-evaluation-harness under two policies, on tasks made here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import programs

EXAMPLE = programs.ROOT / "examples" / "05_lm_eval.py"

# It is not among the test dependencies: beside vLLM it changes the release of python-dateutil.
SEARCHED = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
needs_lm_eval = pytest.mark.skipif(
    shutil.which("lm_eval", path=SEARCHED) is None,
    reason="no lm_eval on PATH: examples/05_lm_eval.py --help says how to install it",
)

SENTENCES = [
    "All human beings are born free and equal in dignity and rights",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife",
    "There is grandeur in this view of life, with its several powers, having been originally breathed into "
    "a few forms or into one",
    "Four score and seven years ago our fathers brought forth on this continent a new nation",
    "We hold these truths to be self-evident, that all men are created equal",
    "In the beginning God created the heaven and the earth",
]
LIMIT = 4


def make_tasks(folder: Path) -> None:
    """Write a task for each kind of request: choose a sentence's end, write it, and score running text."""

    def task(name: str, rows: list[dict], **config: object) -> None:
        data = folder / f"{name}.json"
        data.write_text(json.dumps(rows))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        config = {"task": name, **source, "test_split": "test", **config}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))

    ends = [" " + " ".join(sentence.split()[-4:]) for sentence in SENTENCES]
    rows = [
        {"text": f"{s}.\n{s}.\n{s}.\n{s.removesuffix(end)}", "ends": ends, "label": label, "end": end}
        for label, (s, end) in enumerate(zip(SENTENCES, ends, strict=True))
    ]
    task(
        "choose_the_end",
        rows,
        output_type="multiple_choice",
        doc_to_text="{{text}}",
        doc_to_choice="{{ends}}",
        doc_to_target="label",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    task(
        "write_the_end",
        rows,
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="{{end}}",
        generation_kwargs={"until": [".", "\n"], "max_gen_toks": 16, "do_sample": False},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    task(
        "running_text",
        [{"text": ". ".join(SENTENCES[i:] + SENTENCES[:i])} for i in range(len(SENTENCES))],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )


def run(*args: object, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE, *args]
    environment = programs.newcomers_environment() | environment
    return programs.run(command, timeout=900, status=status, environment=environment)


@pytest.mark.engine
@pytest.mark.full
@needs_lm_eval
def test_tasks_under_two_policies(real_merged, tmp_path):
    make_tasks(tmp_path)
    tasks = ["choose_the_end", "write_the_end", "running_text"]
    output = tmp_path / "measured.json"
    options = ["--tasks", ",".join(tasks), "--policies", "phase,w4a16", "--limit", LIMIT]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = run(real_merged, *options, "--include-path", tmp_path, "--output", output, **offline)

    measured = json.loads(output.read_text())["policies"]
    assert list(measured) == ["phase", "w4a16"]
    for policy in measured.values():
        samples = {task: n["effective"] for task, n in policy["n-samples"].items()}
        assert samples == dict.fromkeys(tasks, LIMIT)
        # The end stands three times in the prompt, the other words do not, so the choice is plain whatever
        # text the weights were calibrated on. A wrong word among those that are written may happen.
        assert policy["results"]["choose_the_end"]["acc,none"] == 1
        assert 0.5 <= policy["results"]["write_the_end"]["exact_match,none"] <= 1
    # Text is scored in prefill passes, which are W8A8 under `phase`, so the two policies read different
    # weights. test_eval asks of more text that W8A8 predicts it better.
    perplexity = {p: run["results"]["running_text"]["word_perplexity,none"] for p, run in measured.items()}
    assert all(1 < value < 1000 for value in perplexity.values())
    assert perplexity["phase"] != perplexity["w4a16"]

    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["task", "metric", "phase", "w4a16"] in lines
    assert ["running_text", "word_perplexity", *(f"{value:.4f}" for value in perplexity.values())] in lines


def test_missing_lm_eval_is_said_before_a_server_starts(tmp_path):
    done = run(tmp_path, "--tasks", "arc_easy", "--lm-eval", tmp_path / "lm_eval", status=1)
    assert "pip install" in done.stderr and "starting" not in done.stdout
