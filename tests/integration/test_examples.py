# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The examples run as they stand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"


def newcomers_environment() -> dict[str, str]:
    """The environment without what the tests set for their own engines."""
    ours = ("VLLM_", "OMP_", "HF_HUB_")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)}


def run(example: str, *args: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *map(str, args)],
        env=newcomers_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_merge(real_variants, tmp_path):
    output = run("01_merge.py", real_variants["w8a8"], real_variants["w4a16"], tmp_path / "merged")
    assert "bit for bit" in output
    assert (tmp_path / "merged" / "config.json").is_file()


def test_offline(real_merged):
    assert "Paris" in run("02_offline.py", real_merged)


def test_serve(real_merged):
    """Asked for three rivers in Europe."""
    answer = run("03_serve.py", real_merged)
    assert re.search("Danube|Rhine|Thames|Seine|Volga|Rhône|Rhone|Elbe|Tagus|Loire|Dnieper|Oder", answer), (
        answer
    )


def test_custom_policy(real_merged):
    lines = run("04_custom_policy.py", real_merged).splitlines()
    taken = {tuple(line.split()[:2]) for line in lines if line.endswith("passes")}
    # Requests may reach the engine one by one, so what else the first passes hold is not fixed.
    assert {("prefill", "w4a16"), ("decode", "w4a16+w8a8[0-1,29]"), ("decode", "w8a8")} <= taken
    assert {plan for phase, plan in taken if phase != "decode"} <= {"w4a16", "w8a8"}


def test_demo_answers_beside_the_16_bit_model_and_draws_every_pass(tiny_merged, tmp_path):
    folder = shutil.copytree(tiny_merged() / "merged", tmp_path / "merged")
    reference = make_checkpoint(tmp_path / "reference", scheme=None, num_layers=4)
    for model in (folder, reference):
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (model / "chat_template.jinja").write_text(template)
    trace = tmp_path / "routes.jsonl"
    lines = run("demo.py", folder, "--reference", reference, "--trace", trace).splitlines()

    assert len(lines) <= 60
    asked = [i for i, line in enumerate(lines) if line.startswith("Q: ")]
    assert len(asked) == 8
    for i in asked:
        both = re.match(r" +both: ", lines[i + 1])
        assert both or (re.match(r" +16 bit: ", lines[i + 1]) and re.match(r" +FlexQuant: ", lines[i + 2]))

    passes = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    drawn = {
        kind: "".join(line.split(maxsplit=1)[1] for line in lines if re.match(rf"{kind} +\S+$", line))
        for kind in ("phase", "plan")
    }
    assert drawn["phase"] == "".join(p["phase"][0] for p in passes)
    assert drawn["plan"] == "".join({"w8a8": "#", "w4a16": "."}[p["plan"]] for p in passes)

    counts = Counter((p["phase"], p["plan"]) for p in passes)
    header = next(line.split() for line in lines if line.startswith("forward passes"))
    for phase in ("prefill", "mixed", "decode"):
        cells = next(line.split() for line in lines if re.match(rf"{phase} +\d", line))
        assert [counts[phase, plan] for plan in header[2:]] == list(map(int, cells[1:]))
    assert re.match(r"Weights in MiB: (\w+ [\d.]+( \+ )?){3} = [\d.]+; in 16 bit [\d.]+$", lines[-1])
    assert all(name in lines[-1] for name in ("shared", "w8a8", "w4a16"))
