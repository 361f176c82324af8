# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The examples run as they stand."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter

import pytest
from transformers import AutoTokenizer

from tests import programs
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import generate

pytestmark = pytest.mark.engine

EXAMPLES = programs.ROOT / "examples"
PROMPTS = ["The capital of France is", "The largest planet of the solar system is"]
"""The prompts of 02_offline.py."""
QUESTION = "Name three rivers in Europe."
"""The question of 03_serve.py."""


def run(example: str, *args: object) -> str:
    command = [sys.executable, EXAMPLES / example, *args]
    return programs.run(command, timeout=600, environment=programs.newcomers_environment()).stdout


@pytest.fixture(scope="module")
def beginnings(real_merged) -> dict[str, tuple[str, ...]]:
    """Return each prompt's five likeliest first tokens of an answer, as an engine of this process finds them.

    Which of them is first may depend on the batch and on the number of threads, where two are close.
    """
    tokenizer = AutoTokenizer.from_pretrained(real_merged)
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompts = {prompt: tokenizer(prompt)["input_ids"] for prompt in PROMPTS}
    prompts[QUESTION] = tokenizer(text, add_special_tokens=False)["input_ids"]
    asked = [{"prompt_token_ids": ids} for ids in prompts.values()]
    ((found,), _) = generate(real_merged, ["phase"], asked, sampling={"max_tokens": 1})[0]
    beginnings = {}
    for (prompt, ids), (_, (likely,)) in zip(prompts.items(), found, strict=True):
        before = tokenizer.decode(ids)
        beginnings[prompt] = tuple(tokenizer.decode([*ids, token]).removeprefix(before) for token in likely)
        assert all(beginnings[prompt])
    return beginnings


def test_merge(real_variants, tmp_path):
    output = run("01_merge.py", real_variants["w8a8"], real_variants["w4a16"], tmp_path / "merged")
    assert "bit for bit" in output
    assert (tmp_path / "merged" / "config.json").is_file()


@pytest.mark.full
def test_offline(real_merged, beginnings):
    output = run("02_offline.py", real_merged)
    for prompt in PROMPTS:
        _, printed, answer = output.partition(prompt)
        assert printed and answer.startswith(beginnings[prompt]), answer[:200]


@pytest.mark.full
def test_serve(real_merged, beginnings):
    answer = run("03_serve.py", real_merged)
    assert answer.startswith(beginnings[QUESTION]), answer


@pytest.mark.full
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
