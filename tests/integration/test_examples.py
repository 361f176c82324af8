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


def test_demo_serves_each_precision_and_charts_what_it_measured(tiny_merged, tmp_path):
    folder = shutil.copytree(tiny_merged(), tmp_path / "demo")
    reference = make_checkpoint(tmp_path / "reference", scheme=None, num_layers=4)
    for model in (folder / "merged", folder / "w4a16", reference):
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (model / "chat_template.jinja").write_text(template)
    trace = tmp_path / "routes.jsonl"
    options = ("--reference", reference, "--static", f"w4a16={folder / 'w4a16'}", "--policy", "w8a8")
    output = run("demo.py", folder / "merged", *options, "--trace", trace)
    servers = {"16 bit", "static w4a16", "FlexQuant"}

    asked = [block for block in output.split("\n\n") if block.startswith("Q: ")]
    assert len(asked) == 8
    for block in asked:
        names = [line.split(":")[0].strip() for line in block.splitlines()[1:]]
        assert names == ["all"] or set(", ".join(names).split(", ")) == servers

    charts = re.findall(r"^(.+)((?:\n  .+? +█+ [\d.]+)+)$", output, re.MULTILINE)
    assert [title.partition(",")[0] for title, _ in charts] == [
        "first token of a prompt of 1024 tokens",
        "each next token of one answer",
        "each next token of 8 answers at once",
        "checkpoint",
    ]
    for _, bars in charts:
        found = {name: (len(bar), float(n)) for name, bar, n in re.findall(r"  (.+?) +(█+) ([\d.]+)", bars)}
        assert set(found) == servers
        longest, largest = max(found.values())
        assert all(abs(bar - number / largest * longest) <= 2 for bar, number in found.values())

    passes = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    lines = output.splitlines()
    drawn = {
        kind: "".join(line.split(maxsplit=1)[1] for line in lines if re.match(rf"{kind} +\S+$", line))
        for kind in ("phase", "plan")
    }
    answering = passes[: len(drawn["phase"])]
    assert len(answering) > 48 and drawn["phase"] == "".join(p["phase"][0] for p in answering)
    assert {p["plan"] for p in passes} == {"w8a8"} and set(drawn["plan"]) == {"#"}
    counted = re.findall(r"^(prefill|mixed|decode) +(\d+)$", output, re.MULTILINE)
    assert Counter({phase: int(n) for phase, n in counted}) == Counter(p["phase"] for p in answering)
