# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Evaluate a merged checkpoint: check the inputs, measure run by run, and return one JSON-able document."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from flexquant.checkpoint.folder import find_model
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint, folder_label
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import check_free_space
from flexquant.checkpoint.weight_bytes import weights_in_layers
from flexquant.documents.results import hash_file
from flexquant.evaluation.engine import (
    describe_command,
    describe_machine,
    describe_versions,
    engine,
    environment,
    prepare_environment,
)
from flexquant.evaluation.inputs import Settings, Subject, question_prompts, read_questions, read_rows
from flexquant.evaluation.measure import (
    Quality,
    Scores,
    TokenIds,
    compare_answers,
    decode_forced,
    engine_options,
    greedy_answers,
    most_tokens,
    summarise_scores,
)
from flexquant.evaluation.report import BytesPerWeight, Evaluation, Result, Run
from flexquant.evaluation.schedule import Passes, PolicyRun, find_candidates, make_schedule
from flexquant.policy.plans import Plan
from flexquant.policy.routes import RouteTable

if TYPE_CHECKING:
    from vllm import LLM

SCHEMA = "flexquant.evaluation/v1"
REFERENCE = "16-bit reference"
"""Name of the reference in results; no variant can have it."""


# vLLM's second model runner has another interface for logits processors.
@environment(VLLM_USE_V2_MODEL_RUNNER="0")
def evaluate(
    checkpoint: str | Path,
    text: str | Path,
    *,
    reference: str | Path | None = None,
    policies: Sequence[str] | None = None,
    questions: Sequence[str] | None = None,
    settings: Settings | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Evaluation:
    """Measure policies of a merged checkpoint on a text file; return a JSON-able document.

    ``reference`` is the folder or Hugging Face id of the 16-bit model; without it only perplexity is
    measured. ``policies``: see :func:`find_candidates`. ``questions`` are answered if there is a reference;
    None: the questions that come with FlexQuant. ``progress`` gets a line before each engine starts.

    Raises FlexQuantError, before anything is measured, for inputs that cannot be evaluated.
    """
    settings = settings or Settings()
    prepare_environment()
    subject = Subject(checkpoint)
    subject.check_length(settings.row_tokens, "a prompt and its continuation")
    candidates = find_candidates(subject, policies)
    prompts: list[list[int]] = []
    longest, questions_tokens = 0, None
    if reference is not None:
        subject.check_reference(reference)
        asked = read_questions(None) if questions is None else questions
        prompts = question_prompts(asked, subject.tokenizer)
    if prompts:
        longest = max(map(len, prompts)) + settings.answer_tokens
        subject.check_length(longest, "a question and its answer")
        questions_tokens = most_tokens(prompts, settings.batch_sizes[0])
    runs = make_schedule(candidates, subject, settings.batch_sizes, settings.prompt_tokens, questions_tokens)
    rows = read_rows(text, subject.tokenizer, settings)

    evaluation = _Evaluation(subject, reference, settings, rows, prompts, runs, progress)
    for batch_size in settings.batch_sizes:
        questions_here = questions_tokens if batch_size == settings.batch_sizes[0] else None
        most = max(settings.row_tokens, longest)
        options = engine_options(batch_size, settings.prompt_tokens, most, questions_here)
        evaluation.measure([run for run in runs if run.batch_size == batch_size], options)
    return {
        "schema": SCHEMA,
        "checkpoint": folder_label(subject.folder),
        "reference": None if reference is None else folder_label(find_model(reference, ("config.json",))),
        "settings": asdict(settings),
        "text": {"file": Path(text).name, "sha256": hash_file(Path(text))},
        "questions": len(prompts),
        "results": evaluation.results(list(candidates)),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "argv": describe_command(),
    }


@dataclass
class _Evaluation:
    """Measures runs, and keeps their results by ``(policy, batch size)``."""

    subject: Subject
    reference: str | Path | None
    settings: Settings
    rows: list[list[int]]
    prompts: list[list[int]]
    """Token ids of the questions."""
    runs: list[PolicyRun]
    progress: Callable[[str], None]
    quality: dict[tuple[str, int], Quality] = field(default_factory=dict)
    passes: dict[tuple[str, int], Passes] = field(default_factory=dict)
    answers: dict[str, list[TokenIds]] = field(default_factory=dict)

    def measure(self, runs: list[PolicyRun], options: JsonObject) -> None:
        """Measure the reference and then the runs at one batch size, on engines with vLLM's ``options``."""
        to_measure = [run for run in runs if run.needs_engine]
        if not to_measure:
            return
        with tempfile.TemporaryDirectory(prefix="flexquant-eval-") as folder:
            stored, scores = None, None
            if self.reference is not None:
                stored = Path(folder, "reference")
                scores = self._measure_reference(self.reference, runs[0], options, stored)
            for run in to_measure:
                self._measure_policy(run, options, Path(folder, f"policy-{run.name}"), stored, scores)

    def _measure_reference(
        self, reference: str | Path, run: PolicyRun, options: JsonObject, stored: Path
    ) -> Scores:
        """Run the 16-bit model in stock vLLM; store its log-probabilities of every step in ``stored``."""
        check_free_space(stored, 4 * len(self.rows) * self.settings.tokens * self.subject.vocab_size)
        self.progress(f"{REFERENCE}, batch size {run.batch_size}")
        with engine(reference, **options) as llm:
            scores = self._score(llm, run.batch_size, stored.with_name("reference-scores"), store_in=stored)
            if run.answers:
                self.answers[REFERENCE] = self._answer(llm, run.batch_size)
        self.quality[REFERENCE, run.batch_size] = summarise_scores(scores)
        return scores

    def _measure_policy(
        self, run: PolicyRun, options: JsonObject, folder: Path, stored: Path | None, reference: Scores | None
    ) -> None:
        """Run the merged checkpoint under the run's policy; score it and have it answer the questions."""
        self.progress(f"{run.name}, batch size {run.batch_size}")
        folder.mkdir()
        policy, trace = folder / "policy.yaml", folder / "trace.jsonl"
        policy.write_text(yaml.safe_dump(run.policy.document))
        serving = {"policy": str(policy), "trace": str(trace)}
        with engine(self.subject.folder, flexquant=serving, **options) as llm:
            if run.same_as is None:
                scores = self._score(llm, run.batch_size, folder, compare_with=stored)
                self.quality[run.name, run.batch_size] = summarise_scores(scores, reference)
                self.passes[run.name, run.batch_size] = Passes.from_trace(trace)
            if run.answers and run.answers_same_as is None:
                self.answers[run.name] = self._answer(llm, run.batch_size)

    def _score(self, llm: LLM, batch_size: int, folder: Path, **files: Path | None) -> Scores:
        return decode_forced(llm, self.rows, self.settings.prompt_tokens, batch_size, folder, **files)

    def _answer(self, llm: LLM, batch_size: int) -> list[TokenIds]:
        return greedy_answers(llm, self.prompts, batch_size, self.settings.answer_tokens)

    def results(self, policies: list[str]) -> list[Result]:
        """Return one entry per batch size for the reference, then one per policy and batch size."""
        found: list[Result] = []
        in_16_bit: BytesPerWeight = {"resident": 2.0, "decode": 2.0}
        for (name, size), quality in self.quality.items():
            if name == REFERENCE:
                of_run: Run = {"policy": name, "batch_size": size}
                found.append({**of_run, "quality": asdict(quality), "bytes_per_weight": in_16_bit})
        runs = sorted(self.runs, key=lambda run: policies.index(run.name))
        return found + [self._result(run) for run in runs]

    def _result(self, run: PolicyRun) -> Result:
        source = run.same_as or (run.name, run.batch_size)
        result: Result = {
            "policy": run.name,
            "batch_size": run.batch_size,
            "prefill_plan": run.prefill_plan.name,
            "decode_plan": run.decode_plan.name,
            "same_as": {"policy": source[0], "batch_size": source[1]} if run.same_as else None,
            "quality": asdict(self.quality[source]),
            "bytes_per_weight": bytes_per_weight(self.subject.checkpoint, run.routes, run.decode_plan),
            "answers": None,
        }
        if run.same_as is None:
            passes, batches = self.passes[source], self.settings.samples // run.batch_size
            decoding = batches * (self.settings.tokens - 1)
            meant = {run.decode_plan.name: decoding} if decoding else {}
            result["passes"] = asdict(passes)
            result["deviations"] = passes.deviations(run.prefill_plan.name, meant, run.batch_size, batches)
        if run.answers:
            answered = run.answers_same_as or run.name
            agreement = compare_answers(self.answers[REFERENCE], self.answers[answered])
            result["answers"] = {**asdict(agreement), "same_as": run.answers_same_as}
        return result


def bytes_per_weight(checkpoint: MergedCheckpoint, routes: RouteTable, decode: Plan) -> BytesPerWeight:
    """Return those of a policy with the table ``routes`` and the plan ``decode`` in decode passes."""
    weights = max(weights_in_layers(checkpoint.variant_tensors(name)) for name in checkpoint.merged.variants)

    def per_weight(plans: Sequence[Plan]) -> float:
        sizes = routes.stored_bytes(checkpoint, plans).values()
        return sum(size for of_runs in sizes for run, size in of_runs.items() if run) / weights

    return {"resident": per_weight(routes.plans), "decode": per_weight([decode])}
