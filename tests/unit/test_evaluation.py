# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Evaluation without an engine: the schedule, bytes, and every refusal."""

import json
import os
import shutil
from pathlib import Path

import pytest

from flexquant.cli import main
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.evaluating import bytes_per_weight, evaluate
from flexquant.evaluation.inputs import Settings, Subject, question_prompts, read_questions
from flexquant.evaluation.schedule import Passes, find_candidates, make_schedule
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import Plan
from tests.checkpoints import make_checkpoint, make_pair
from tests.policies import THRESHOLD, rules
from tests.publishers import edits

SMALL = Settings(batch_sizes=(2,), samples=2, prompt_tokens=8, tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with ``merged``, the 16-bit ``model``, a ``text.txt`` and ``threshold.yaml``."""
    folder = tmp_path_factory.mktemp("evaluation")
    make_checkpoint(folder / "model", scheme=None)
    merge_checkpoints(make_pair(folder), folder / "merged")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    (folder / "threshold.yaml").write_text(THRESHOLD)
    return folder


@pytest.fixture(scope="module")
def subject(folder) -> Subject:
    return Subject(folder / "merged")


def test_what_a_config_leaves_out_is_transformers_default(folder, tmp_path):
    shutil.copytree(folder / "merged", tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    del config["vocab_size"], config["max_position_embeddings"]
    (tmp_path / "merged/config.json").write_text(json.dumps(config))
    found = Subject(tmp_path / "merged")
    assert (found.vocab_size, found.max_length) == (32000, 2048)


def schedule(subject, names, batch_sizes=(4, 8), questions_tokens=None):
    return {
        (run.name, run.batch_size): run
        for run in make_schedule(find_candidates(subject, names), subject, batch_sizes, 16, questions_tokens)
    }


def test_answers_are_the_same_only_if_smaller_batches_and_longer_prompts_are(subject, folder, tmp_path):
    names = ["w8a8", str(folder / "threshold.yaml"), "phase", "phase-batch"]
    runs = schedule(subject, names, batch_sizes=(8, 16), questions_tokens=100)
    threshold = runs["threshold.yaml", 8]
    assert threshold.same_as == ("w8a8", 8) and threshold.answers_same_as is None
    assert threshold.needs_engine  # its last answers are decoded in W4A16
    assert runs["phase-batch", 8].answers_same_as == "phase" and not runs["phase-batch", 8].needs_engine
    assert {size for (_, size), run in runs.items() if run.answers} == {8}
    # A batch of rows has 64 tokens of prompts, one of questions 100.
    (tmp_path / "long.yaml").write_text(rules("- {when: {tokens: {max: 64}}, use: w8a8}", "- use: w4a16"))
    long = schedule(subject, ["w8a8", str(tmp_path / "long.yaml")], questions_tokens=100)["long.yaml", 4]
    assert long.same_as == ("w8a8", 4) and long.answers_same_as is None


def test_derivations_under_one_name_and_heads_in_two_precisions_are_told_apart(subject, tmp_path):
    for name, weights in (("a", "int4"), ("b", "int8")):
        derived = f"derive: {{x: {{from: w4a16, activations: int8, weights: {weights}}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(rules("- use: x") + derived)
    runs = schedule(subject, [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")], questions_tokens=100)
    assert all(run.needs_engine for run in runs.values() if run.batch_size == 4)
    assert runs["b.yaml", 8].same_as == ("b.yaml", 4)
    (tmp_path / "int8.yaml").write_text(rules("- use: w8a8") + "head: int8\n")
    runs = schedule(subject, ["w8a8", str(tmp_path / "int8.yaml")], questions_tokens=100)
    assert all(run.needs_engine for run in runs.values() if run.batch_size == 4)
    assert runs["int8.yaml", 4].same_as is None and runs["int8.yaml", 8].same_as == ("int8.yaml", 4)


def test_default_policies_are_the_variants_and_the_default_or_the_stored_one(subject, folder, tmp_path):
    assert list(find_candidates(subject, None)) == ["w8a8", "w4a16", "phase-batch"]
    sources = {"w8a8": folder / "w8a8", "w4a16": folder / "w4a16"}
    merge_checkpoints(sources, tmp_path / "merged", policy="phase")
    assert list(find_candidates(Subject(tmp_path / "merged"), None)) == ["w8a8", "w4a16", "stored"]
    # A policy that is named twice is one.
    assert list(find_candidates(subject, ["w8a8", "phase", "w8a8", "phase"])) == ["w8a8", "phase"]


def test_a_variant_of_any_name_is_a_policy(folder, tmp_path):
    (tmp_path / "default.yaml").write_text(THRESHOLD.replace("w8a8", "eight").replace("w4a16", "phase"))
    sources = {"eight": folder / "w8a8", "phase": folder / "w4a16"}
    merge_checkpoints(sources, tmp_path / "merged", policy=str(tmp_path / "default.yaml"))
    candidates = find_candidates(Subject(tmp_path / "merged"), None)
    found = {name: policy.variants for name, policy in candidates.items()}
    assert found == {"eight": ("eight",), "phase": ("phase",), "stored": ("phase", "eight")}


def test_two_files_of_one_name_are_refused(subject, folder, tmp_path):
    (tmp_path / "threshold.yaml").write_text(THRESHOLD)
    with pytest.raises(UsageError, match="two policies are named 'threshold.yaml'"):
        find_candidates(subject, [str(folder / "threshold.yaml"), str(tmp_path / "threshold.yaml")])


def test_bytes_per_weight_by_hand(subject, tmp_path):
    """Each of 2 layers has 7 linears and 2 norms; hidden 128, K and V 64, MLP 256; bf16 scales and norms."""
    linears = [(128, 128), (64, 128), (64, 128), (128, 128), (256, 128), (256, 128), (128, 256)]
    weights = sum(o * i for o, i in linears) + 2 * 128
    int8 = sum(o * i + 2 * o for o, i in linears)
    int4 = sum(o * i // 2 + 2 * o * i // 64 + 16 for o, i in linears)  # and the shape, two int64
    norms = 2 * 2 * 128
    runs = schedule(subject, ["w8a8", "phase"])
    w8a8, w4a16 = (Plan.from_layers((name,) * 2) for name in ("w8a8", "w4a16"))
    pure = bytes_per_weight(subject.checkpoint, runs["w8a8", 4].routes, w8a8)
    assert pure["resident"] == pure["decode"] == pytest.approx((int8 + norms) / weights)
    phase = bytes_per_weight(subject.checkpoint, runs["phase", 4].routes, w4a16)
    assert phase["resident"] == pytest.approx((int8 + int4 + norms) / weights)
    assert phase["decode"] == pytest.approx((int4 + norms) / weights)
    (tmp_path / "one-layer.yaml").write_text(rules('- use: {default: w4a16, layers: {"0": w8a8}}'))
    one_layer = schedule(subject, [str(tmp_path / "one-layer.yaml")])["one-layer.yaml", 4]
    half = bytes_per_weight(subject.checkpoint, one_layer.routes, one_layer.routes.plans[0])
    assert half["resident"] == half["decode"] == pytest.approx((int8 / 2 + int4 / 2 + norms) / weights)
    # Derived variants are held beside their sources, and have the same norms.
    derived = schedule(subject, ["single-copy"], batch_sizes=(4,))["single-copy", 4]
    both = bytes_per_weight(subject.checkpoint, derived.routes, derived.decode_plan)
    assert both["resident"] == pytest.approx((2 * int4 + norms) / weights)
    assert both["decode"] == phase["decode"]


def trace_of(tmp_path, *passes) -> Path:
    """Add a policy and its passes to a trace."""
    keys = ("phase", "tokens", "sequences", "plan")
    with (tmp_path / "trace.jsonl").open("a") as trace:
        for line in ({"policy": "phase"}, *(dict(zip(keys, p, strict=True)) for p in passes)):
            trace.write(json.dumps(line) + "\n")
    return tmp_path / "trace.jsonl"


def test_passes_are_those_since_the_policy_was_changed(tmp_path):
    decode = ("decode", 2, 2, "w4a16")
    trace_of(tmp_path, ("prefill", 16, 2, "w8a8"), ("decode", 2, 2, "w8a8"))
    passes = Passes.from_trace(trace_of(tmp_path, ("prefill", 16, 2, "w8a8"), decode, decode))
    assert passes.by_plan == {"decode": {"w4a16": 2}, "prefill": {"w8a8": 1}}
    assert passes.decode_batch_sizes == {2: 2}
    assert passes.deviations("w8a8", {"w4a16": 2}, batch_size=2, batches=1) == []


def test_passes_that_deviate_are_told(tmp_path):
    prompts = ("prefill", 16, 2, "w8a8"), ("mixed", 9, 2, "w8a8")
    decodes = ("decode", 2, 2, "w4a16"), ("decode", 1, 1, "w8a8")
    passes = Passes.from_trace(trace_of(tmp_path, *prompts, *decodes))
    assert passes.deviations("w8a8", {"w4a16": 2}, batch_size=2, batches=1) == [
        "decode passes were 1 of w4a16, 1 of w8a8, but 2 of w4a16 were meant",
        "mixed passes were 1 of w8a8, but none were meant",
        "some decode passes had 1 sequences instead of 2",
    ]


def test_questions_that_come_along_and_those_of_a_file_which_end_at_a_newline_alone(tmp_path):
    questions = read_questions(None)
    assert len(questions) == len(set(questions)) == 24
    file = tmp_path / "questions.txt"
    file.write_text("Which poem?\u2028It has two lines.\r\n\nWhy?\n", encoding="utf-8")
    assert read_questions(file) == ["Which poem?\u2028It has two lines.", "Why?"]


def test_questions_take_the_chat_template_if_there_is_one(folder):
    tokenizer = Subject(folder / "merged").tokenizer
    assert question_prompts(["Why?"], tokenizer) == [tokenizer("Why?")["input_ids"]]
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}|"
    (prompt,) = question_prompts(["Why?"], tokenizer)
    assert tokenizer.decode(prompt) == "<user>Why?|"


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(folder, tmp_path, capsys):
    command = ["eval", str(folder / "merged"), "--text", str(folder / "text.txt"), "--batch-sizes", "2"]
    command += ["--samples", "2", "--prompt-tokens", "8", "--tokens", "4", "--policies", "w8a8"]
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "results"  # not even root can make it
    assert main([*command, "--output", str(output)]) == 1
    captured = capsys.readouterr()
    assert f"cannot write into {output}" in captured.err and "give another --output" in captured.err
    assert "batch size" not in captured.err  # no engine was started


def test_a_refused_evaluation_leaves_no_empty_output(folder, tmp_path):
    command = ["eval", str(folder / "merged"), "--text", str(tmp_path / "none.txt")]
    assert main([*command, "--output", str(tmp_path / "results")]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": (0,)}, "a batch size is 0; give a whole number of at least 1"),
        ({"batch_sizes": ()}, "no batch size is given"),
        ({"samples": 10, "batch_sizes": (4,)}, "10 samples are not a multiple .* --samples 12"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"prompt_tokens": -1}, "--prompt-tokens is -1"),
    ],
)
def test_settings_that_cannot_be_measured(changes, message):
    with pytest.raises(UsageError, match=message):
        Settings(**changes)


def refused(folder, message, **changes):
    arguments = {"checkpoint": folder / "merged", "text": folder / "text.txt", "settings": SMALL, **changes}
    with pytest.raises(FlexQuantError, match=message):
        evaluate(arguments.pop("checkpoint"), arguments.pop("text"), **arguments)


def test_refused_inputs(folder, tmp_path):
    refused(folder, "no such folder", checkpoint=tmp_path / "none")
    refused(folder, "not a merged checkpoint", checkpoint=folder / "w8a8")
    refused(folder, "there is no file", text=tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("12345678901")
    refused(folder, r"has 11 tokens, but 2 samples of 12 tokens need 24", text=tmp_path / "short.txt")
    refused(folder, "unknown policy 'w5a5'.*variant of the checkpoint: w8a8, w4a16", policies=["w5a5"])
    refused(folder, "no policy is given", policies=[])
    refused(folder, "stores no policy", policies=["stored"])
    long = Settings(batch_sizes=(2,), samples=2, prompt_tokens=2000, tokens=100)
    refused(folder, "2100 tokens, but the model's max_position_embeddings is 2048", settings=long)
    refused(folder, "a question and its answer", reference=folder / "model", questions=["?" * 3000])


@pytest.mark.parametrize("value", [None, "1"])
def test_the_environment_is_the_callers_again(folder, tmp_path, monkeypatch, value):
    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    refused(folder, "there is no file", text=tmp_path / "none.txt")
    assert os.environ.get(name) == value


def test_refused_references(folder, tmp_path):
    refused(folder, "the reference .* cannot be read", reference=tmp_path / "none")
    refused(folder, "the reference .* quantised already .compressed-tensors.", reference=folder / "w8a8")
    wider = make_checkpoint(tmp_path / "wider", scheme=None, vocab_size=384)
    refused(folder, "a vocabulary of 384 tokens, but .* one of 320", reference=wider)
    other = make_checkpoint(tmp_path / "other", scheme=None)
    edits.tokenizer(edits.swapped_tokens)(other)
    refused(folder, "the tokenizers of the reference .* differ", reference=other)


@pytest.mark.parametrize(
    "sizes, found", [("8,x", "'x' is not a whole number"), ("0", "'0' is not"), (",", "the list is empty")]
)
def test_batch_sizes_that_are_no_numbers(capsys, sizes, found):
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "folder", "--text", "file", "--batch-sizes", sizes])
    assert f"argument --batch-sizes: {found}" in capsys.readouterr().err


def test_questions_need_a_reference_and_a_file_that_holds_some(folder, tmp_path, capsys):
    command = ["eval", str(folder / "merged"), "--text", str(folder / "text.txt")]
    command += ["--questions", str(tmp_path / "q.txt")]
    assert main(command) == 2 and "--questions needs --reference" in capsys.readouterr().err
    (tmp_path / "q.txt").write_text("\n \n")
    assert main([*command, "--reference", str(folder / "model")]) == 1
    assert "holds no questions; write one a line, or pass --no-questions" in capsys.readouterr().err


def test_without_questions_no_answer_has_to_fit(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    (tmp_path / "short.txt").write_text("words")
    command = ["eval", str(folder / "merged"), "--text", str(tmp_path / "short.txt")]
    command += ["--reference", str(folder / "model"), "--answer-tokens", "3000"]
    for options, said in (([], "a question and its answer"), (["--no-questions"], "has 5 tokens, but")):
        assert main([*command, *options]) == 1 and said in capsys.readouterr().err
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
