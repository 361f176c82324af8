# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""``flexquant eval`` through vLLM: forced decoding scores what the model says, and policies run as meant."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.cli import main
from flexquant.evaluation.evaluating import evaluate
from flexquant.evaluation.inputs import Settings, read_rows
from flexquant.evaluation.measure import decode_forced, engine_options
from flexquant.merge import merge_checkpoints
from tests.checkpoints import make_checkpoint
from tests.integration.conftest import engine
from tests.policies import THRESHOLD

pytestmark = pytest.mark.engine

PROMPT, TOKENS = 64, 24


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(topics[name] for name in sorted(topics)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a 16-bit model, from whose weights ``tiny_merged`` has its variants."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model", scheme=None, num_layers=4)


@pytest.fixture(scope="module")
def evaluation(tiny_merged, model, text, tmp_path_factory) -> tuple[dict, Path]:
    """Return ``quality.json`` and the output folder of the command on a tiny model."""
    output = tmp_path_factory.mktemp("output")
    (output / "threshold.yaml").write_text(THRESHOLD)
    (output / "questions.txt").write_text("Who are you?\nWhat is two and two?\nWhy?\nWhere is Rome?\nHow?\n")
    command = ["eval", tiny_merged() / "merged", "--text", text, "--reference", model]
    command += ["--policies", f"w8a8,w4a16,phase,{output / 'threshold.yaml'}", "--batch-sizes", "4,8"]
    command += ["--samples", 8, "--prompt-tokens", PROMPT, "--tokens", TOKENS, "--answer-tokens", 8]
    command += ["--questions", output / "questions.txt", "--output", output / "results"]
    assert main([str(part) for part in command]) == 0
    return json.loads((output / "results" / "quality.json").read_text()), output


def results(document: dict) -> dict[tuple[str, int], dict]:
    return {(r["policy"], r["batch_size"]): r for r in document["results"]}


def prompt_nll(llm, row: list[int]) -> list[float]:
    """Return the negative log-likelihoods of a row's tokens but the first, from one prefill of the row."""
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": row}], parameters, use_tqdm=False)
    return [-step[token].logprob for token, step in zip(row[1:], output.prompt_logprobs[1:], strict=True)]


def test_every_policy_ran_the_passes_it_was_meant_to(evaluation):
    document, _ = evaluation
    found = results(document)
    assert document["results"][0]["policy"] == "16-bit reference"
    decoded, taken = 2 * (TOKENS - 1), {"w8a8": ("w8a8", "w8a8"), "w4a16": ("w4a16", "w4a16")}
    for policy, (prefill, decode) in (taken | {"phase": ("w8a8", "w4a16")}).items():
        by_plan = {"prefill": {prefill: 2}, "decode": {decode: decoded}}
        assert found[policy, 4]["passes"] == {"by_plan": by_plan, "decode_batch_sizes": {"4": decoded}}
        assert found[policy, 4]["deviations"] == []


def test_the_first_token_is_the_prefill_plans_the_others_the_decode_plans(evaluation):
    found = results(evaluation[0])
    w8a8, w4a16, phase = (found[name, 4]["quality"] for name in ("w8a8", "w4a16", "phase"))
    assert phase["first_token_kl"] == pytest.approx(w8a8["first_token_kl"], abs=1e-6)
    assert phase["first_token_kl"] != pytest.approx(w4a16["first_token_kl"], rel=0.01)
    assert 0 < w8a8["mean_kl"] < phase["mean_kl"] < w4a16["mean_kl"]
    assert found["phase", 4]["quality"]["tokens"] == 8 * TOKENS


def test_numbers_of_equal_plans_are_reused(evaluation):
    found = results(evaluation[0])
    alike = {key: r["same_as"] for key, r in found.items() if r.get("same_as")}
    sources = {key: (same["policy"], same["batch_size"]) for key, same in alike.items()}
    assert sources == {
        ("threshold.yaml", 4): ("phase", 4),
        **{(policy, 8): (policy, 4) for policy in ("w8a8", "w4a16", "phase")},
        ("threshold.yaml", 8): ("w8a8", 4),
    }
    for key, source in sources.items():
        assert found[key]["quality"] == found[source]["quality"] and "passes" not in found[key]


def test_answers_are_compared_with_the_references(evaluation):
    found = results(evaluation[0])
    for policy in ("w8a8", "w4a16", "phase"):
        answers = found[policy, 4]["answers"]
        assert answers["questions"] == 5
        assert 0 <= answers["identical"] <= 5 and 0 <= answers["matched"] <= 1
        assert found[policy, 8]["answers"] is None
    assert found["threshold.yaml", 4]["answers"] == {**found["phase", 4]["answers"], "same_as": "phase"}


def test_what_is_written(evaluation):
    document, output = evaluation
    written = {file.name for file in (output / "results").iterdir()}
    assert written == {"quality.json", "quality.md", "quality.png"}
    assert "| phase " in (output / "results" / "quality.md").read_text()
    assert str(output) not in json.dumps(document)
    assert document["machine"]["cpu"] and document["versions"]["vllm"]
    assert len(document["text"]["sha256"]) == 64
    found = results(document)
    assert found["16-bit reference", 4]["bytes_per_weight"] == {"resident": 2.0, "decode": 2.0}
    phase = found["phase", 4]["bytes_per_weight"]
    assert phase["decode"] == found["w4a16", 4]["bytes_per_weight"]["decode"] < 0.6
    assert 1.5 < phase["resident"] < 1.6


@pytest.mark.full
def test_qwen2_with_variants_of_other_names_without_a_reference(tiny_merged, text, tmp_path):
    folder = tiny_merged("qwen2")
    (tmp_path / "default.yaml").write_text(THRESHOLD.replace("w8a8", "big").replace("w4a16", "little"))
    sources = {"big": folder / "w8a8", "little": folder / "w4a16"}
    merge_checkpoints(sources, tmp_path / "merged", policy=str(tmp_path / "default.yaml"))
    settings = Settings(batch_sizes=(2,), samples=2, prompt_tokens=PROMPT, tokens=4)
    found = results(evaluate(tmp_path / "merged", text, settings=settings))
    assert set(found) == {("big", 2), ("little", 2), ("stored", 2)}
    assert found["stored", 2]["passes"]["by_plan"] == {"prefill": {"big": 1}, "decode": {"little": 3}}
    assert len({r["quality"]["perplexity"] for r in found.values()}) == 3
    assert all(r["quality"]["mean_kl"] is None and r["answers"] is None for r in found.values())


@pytest.fixture(scope="module")
def exact(model) -> Iterator[LLM]:
    """Yield an engine in 32 bit for the two tests below."""
    options = engine_options(3, PROMPT, max_model_len=PROMPT + TOKENS + 1)
    with engine(model, dtype="float32", **options) as llm:
        yield llm


def rows_of(text: Path, model: Path, samples: int) -> list[list[int]]:
    settings = Settings(batch_sizes=(1,), samples=samples, prompt_tokens=PROMPT, tokens=TOKENS)
    return read_rows(text, load_tokenizer(model), settings)


def test_forced_decoding_scores_as_a_prefill_of_the_same_tokens(exact, model, text, tmp_path):
    """Rows have different lengths and do not all fit into a batch: rows end, move up and begin meanwhile."""
    lengths = [24, 3, 11, 1, 17, 8, 20]
    rows = [row[: PROMPT + n] for row, n in zip(rows_of(text, model, len(lengths)), lengths, strict=True)]
    files = [tmp_path / f"{i}.npz" for i in range(len(rows))]
    parameters = []
    for row, file in zip(rows, files, strict=True):
        extra = {"flexquant_evaluation": {"forced": row[PROMPT:], "scores": str(file)}}
        parameters.append(SamplingParams(max_tokens=len(row) - PROMPT, ignore_eos=True, extra_args=extra))
    outputs = exact.generate([{"prompt_token_ids": r[:PROMPT]} for r in rows], parameters, use_tqdm=False)
    expected = [prompt_nll(exact, row)[PROMPT - 1 :] for row in rows]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [row[PROMPT:] for row in rows]
    for file, nll in zip(files, expected, strict=True):
        assert np.load(file)["nll"] == pytest.approx(nll, abs=1e-3)
    assert np.ptp(np.concatenate(expected)) > 1  # rows and positions can be told apart


def test_a_model_does_not_diverge_from_itself(exact, model, text, tmp_path):
    rows, stored_in = rows_of(text, model, 4), tmp_path / "stored"
    stored = decode_forced(exact, rows, PROMPT, 2, tmp_path / "first", store_in=stored_in)
    compared = decode_forced(exact, rows, PROMPT, 2, tmp_path / "again", compare_with=stored_in)
    log_probs = np.load(stored_in / "3.npy")
    assert log_probs.shape == (TOKENS, 320)
    assert np.exp(log_probs.astype(np.float64)).sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert stored.kl is None and compared.kl is not None and np.abs(compared.kl).max() < 1e-6
    assert compared.same_top is not None and compared.same_top.all()
    assert compared.nll == pytest.approx(stored.nll)
