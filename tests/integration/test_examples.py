# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The examples, and every command that the README shows, run as they stand."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import yaml
from transformers import AutoTokenizer
from vllm.platforms import current_platform

from benchmarks.speed.command_line import make_parser
from examples.vllm_server import vllm_serve
from flexquant.cli import build_parser, main
from tests import programs, readme
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import generate, records_of

BIN = Path(sys.executable).parent
TUNED = programs.ROOT / "benchmarks" / "results" / "tuning" / "smollm2-135m.yaml"
FEW = {
    "eval": "--samples 4 --batch-sizes 4 --prompt-tokens 32 --tokens 8 --no-questions",
    "search": "--samples 1 --batch-size 1 --prompt-tokens 8 --tokens 2",
    "sensitivity": "--samples 1 --batch-size 1 --prompt-tokens 8 --tokens 2",
    "tune": "--quick --rounds 1 --max-batch 4 --max-tokens 32",
    "fit": "--quick --rounds 1 --max-batch 4 --max-tokens 32",
}


@pytest.fixture
def folder(tmp_path, real_model, real_variants, real_merged):
    """Return a folder with what the README's commands expect: a build's output, a policy, a text."""
    (tmp_path / "my-variants").mkdir()
    links = {f"my-variants/{name}": path for name, path in real_variants.items()}
    for name, path in (links | {"my-model": real_model, "my-model-merged": real_merged}).items():
        (tmp_path / name).symlink_to(path)
    (tmp_path / "my-policy.yaml").write_text(readme.documents("flexquant.policy/v1")[0])
    (tmp_path / "my-text.txt").write_text(topics["execmodel"])
    return tmp_path


def of(program: str) -> list[str]:
    return [command for command in readme.commands() if shlex.split(command)[0] == program]


def test_the_readme_shows_no_other_commands():
    programs = {shlex.split(command)[0] for command in readme.commands()}
    assert programs == {"make", "flexquant", "vllm", "python"}


@pytest.mark.parametrize("command", of("make"))
def test_what_make_runs_is_there_and_understood(command):
    """`make test` runs this. test_examples runs what `make demo` starts; this checks that it starts that."""
    command = [*shlex.split(command), "--dry-run", "--always-make"]
    lines = programs.run(command, timeout=120).stdout.replace("\\\n", " ").splitlines()
    assert lines
    for program, *arguments in filter(None, map(shlex.split, lines)):
        if program.endswith("/flexquant"):
            build_parser().parse_args(arguments)
        for script in (a.removeprefix("--ignore=") for a in arguments if a.endswith(".py")):
            assert (programs.ROOT / script).is_file(), script


@pytest.mark.parametrize("command", of("python"))
def test_benchmark_commands_are_understood(command):
    """test_benchmarks runs the smallest of these commands."""
    program, module, name, *arguments = shlex.split(command)
    assert (program, module, name) == ("python", "-m", "benchmarks")
    make_parser("").parse_args(["run", *arguments] if arguments == ["--quick"] else arguments)


@pytest.mark.engine
@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.full)])
def test_flexquant_commands_in_order(folder, monkeypatch, measured):
    """`make test` parses the commands that measure, which have tests of their own, and runs the others."""
    monkeypatch.chdir(folder)
    commands = [c for c in of("flexquant") if not c.startswith(("flexquant quantize", "flexquant build"))]
    assert len(commands) > 6
    if not measured:
        shutil.copy(TUNED, "my-tuned.yaml")
    for command in commands:
        _, subcommand, *arguments = shlex.split(command.partition(" > ")[0])
        if measured or subcommand not in FEW:
            assert main([subcommand, *arguments, *shlex.split(FEW.get(subcommand, ""))]) == 0, command
        else:
            build_parser().parse_args([subcommand, *arguments])


def test_the_program_flexquant_is_installed():
    """The test above calls the program's entry point, but not the program."""
    assert "phase-batch" in programs.run([BIN / "flexquant", "policy", "list"], timeout=120).stdout


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("command", of("vllm"))
def test_vllm_commands(command, real_merged, tmp_path, monkeypatch):
    (tmp_path / "my-policy.yaml").write_text(readme.documents("flexquant.policy/v1")[0])
    shutil.copy(TUNED, tmp_path / "my-tuned.yaml")
    monkeypatch.chdir(tmp_path)
    program, subcommand, model, *arguments = shlex.split(command)
    assert (program, subcommand, model) == ("vllm", "serve", "my-model-merged")
    with vllm_serve(real_merged, *arguments, "--max-model-len", "512", "--enforce-eager") as url:
        assert url


EXAMPLES = programs.ROOT / "examples"
PROMPTS = ["The capital of France is", "The largest planet of the solar system is"]
"""The prompts of 02_offline.py."""
QUESTION = "Name three rivers in Europe."
"""The question of 03_serve.py."""


def start(example: str, *args: object, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    environment = programs.newcomers_environment() | more
    command = [sys.executable, EXAMPLES / example, *args]
    return programs.run(command, timeout=900, status=status, environment=environment)


def run(example: str, *args: object) -> str:
    return start(example, *args).stdout


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
    found = generate(real_merged, ["phase"], asked, sampling={"max_tokens": 1})[0].answers[0]
    beginnings = {}
    for (prompt, ids), (_, (likely,)) in zip(prompts.items(), found, strict=True):
        before = tokenizer.decode(ids)
        beginnings[prompt] = tuple(tokenizer.decode([*ids, token]).removeprefix(before) for token in likely)
        assert all(beginnings[prompt])
    return beginnings


@pytest.mark.engine
def test_merge(real_variants, tmp_path):
    output = run("01_merge.py", real_variants["w8a8"], real_variants["w4a16"], tmp_path / "merged")
    assert "bit for bit" in output
    assert (tmp_path / "merged" / "config.json").is_file()


@pytest.mark.engine
@pytest.mark.full
def test_offline(real_merged, beginnings):
    output = run("02_offline.py", real_merged)
    for prompt in PROMPTS:
        _, printed, answer = output.partition(prompt)
        assert printed and answer.startswith(beginnings[prompt]), answer[:200]


@pytest.mark.engine
@pytest.mark.full
def test_serve(real_merged, beginnings):
    answer = run("03_serve.py", real_merged)
    assert answer.startswith(beginnings[QUESTION]), answer


@pytest.mark.engine
@pytest.mark.full
def test_custom_policy(real_merged):
    lines = run("04_custom_policy.py", real_merged).splitlines()
    taken = {tuple(line.split()[:2]) for line in lines if line.endswith("passes")}
    # Requests may reach the engine one by one, so what else the first passes hold is not fixed.
    assert {("prefill", "w4a16"), ("decode", "w4a16+w8a8[0-1,29]"), ("decode", "w8a8")} <= taken
    assert {plan for phase, plan in taken if phase != "decode"} <= {"w4a16", "w8a8"}


@pytest.mark.engine
@pytest.mark.full
def test_demo_serves_each_precision_and_charts_what_it_measured(tiny_merged, tmp_path):
    folder = shutil.copytree(tiny_merged(), tmp_path / "demo")
    reference = make_checkpoint(tmp_path / "reference", scheme=None, num_layers=4)
    for model in (folder / "merged", folder / "w4a16", reference):
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (model / "chat_template.jinja").write_text(template)
    trace = tmp_path / "routes.jsonl"
    options = ("--reference", reference, "--static", f"w4a16={folder / 'w4a16'}", "--policy", "w8a8")
    output = run("demo.py", folder / "merged", *options, "--trace", trace)
    servers = {"16 bit", "FlexQuant"}
    current_platform.import_kernels()
    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        servers.add("static w4a16")
    else:  # vLLM alone has no kernel for INT4 on this CPU
        assert "and ended: vLLM alone does not serve it here" in output
    asked = [block for block in output.split("\n\n") if block.startswith("Q: ")]
    assert len(asked) == 8
    for block in asked:
        names = [line.split(":")[0].strip() for line in block.splitlines()[1:]]
        assert names == ["all"] or set(", ".join(names).split(", ")) == servers
    charts = re.findall(r"^(.+)((?:\n  .+? +█+ [\d.]+)+)$", output, re.MULTILINE)
    assert [title.partition(",")[0] for title, _ in charts] == [
        *("first token of a prompt of 1024 tokens", "each next token of one answer"),
        *("each next token of 8 answers at once", "checkpoint"),
    ]
    for _, bars in charts:
        found = {name: (len(bar), float(n)) for name, bar, n in re.findall(r"  (.+?) +(█+) ([\d.]+)", bars)}
        assert set(found) == servers
        longest, largest = max(found.values())
        assert all(abs(bar - number / largest * longest) <= 2 for bar, number in found.values())
    passes, lines = records_of(trace)[1:], output.splitlines()
    assert lines[-1].endswith("flexquant advise MODEL --device h200")
    drawn = {
        kind: "".join(line.split(maxsplit=1)[1] for line in lines if re.match(rf"{kind} +\S+$", line))
        for kind in ("phase", "plan")
    }
    answering = passes[: len(drawn["phase"])]
    assert len(answering) > 48 and drawn["phase"] == "".join(p["phase"][0] for p in answering)
    assert {p["plan"] for p in passes} == {"w8a8"} and set(drawn["plan"]) == {"#"}
    counted = re.findall(r"^(prefill|mixed|decode) +(\d+)$", output, re.MULTILINE)
    assert Counter({phase: int(n) for phase, n in counted}) == Counter(p["phase"] for p in answering)


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
    mean = {"aggregation": "mean", "higher_is_better": True}
    asked = {"doc_to_text": "{{text}}", "doc_to_choice": "{{ends}}", "doc_to_target": "label"}
    asked["metric_list"] = [{"metric": "acc"} | mean]
    task("choose_the_end", rows, output_type="multiple_choice", **asked)
    asked = {"doc_to_text": "{{text}}", "doc_to_target": "{{end}}"}
    asked["generation_kwargs"] = {"until": [".", "\n"], "max_gen_toks": 16, "do_sample": False}
    exact = [{"metric": "exact_match"} | mean]
    task("write_the_end", rows, output_type="generate_until", **asked, metric_list=exact)
    texts = [{"text": ". ".join(SENTENCES[i:] + SENTENCES[:i])} for i in range(len(SENTENCES))]
    asked = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}]}
    task("running_text", texts, output_type="loglikelihood_rolling", **asked)


@pytest.mark.engine
@pytest.mark.full
@needs_lm_eval
def test_tasks_under_two_policies(real_merged, tmp_path):
    make_tasks(tmp_path)
    tasks = ["choose_the_end", "write_the_end", "running_text"]
    output = tmp_path / "measured.json"
    options = ["--tasks", ",".join(tasks), "--policies", "phase,w4a16", "--limit", LIMIT]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    options += ["--include-path", tmp_path, "--output", output]
    done = start("05_lm_eval.py", real_merged, *options, **offline)
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
    # weights. test_quality asks of more text that W8A8 predicts it better.
    perplexity = {p: run["results"]["running_text"]["word_perplexity,none"] for p, run in measured.items()}
    assert all(1 < value < 1000 for value in perplexity.values())
    assert perplexity["phase"] != perplexity["w4a16"]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["task", "metric", "phase", "w4a16"] in lines
    assert ["running_text", "word_perplexity", *(f"{value:.4f}" for value in perplexity.values())] in lines


def test_missing_lm_eval_is_said_before_a_server_starts(tmp_path):
    options = ["--tasks", "arc_easy", "--lm-eval", tmp_path / "lm_eval"]
    done = start("05_lm_eval.py", tmp_path, *options, status=1)
    assert "pip install" in done.stderr and "starting" not in done.stdout
