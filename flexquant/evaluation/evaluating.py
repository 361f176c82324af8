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

from flexquant.checkpoint.merged_checkpoint import folder_label
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import check_free_space
from flexquant.documents.results import hash_file
from flexquant.evaluation.inputs import Settings, Subject, question_prompts, read_questions, read_rows
from flexquant.evaluation.measure import (
    TokenIds,
    compare_answers,
    decode_forced,
    engine_options,
    greedy_answers,
    most_tokens,
)
from flexquant.evaluation.schedule import (
    Candidate,
    Passes,
    PolicyRun,
    find_candidates,
    make_schedule,
)
from flexquant.evaluation.scores import Quality, Scores, summarise_scores
from flexquant.evaluation.weight_bytes import BytesPerWeight, LayerBytes
from flexquant.measuring.engine import engine, environment, prepare_environment
from flexquant.measuring.machine import describe_command, describe_machine, describe_versions

if TYPE_CHECKING:
    from vllm import LLM

SCHEMA = "flexquant.evaluation/v1"
REFERENCE = "16-bit reference"
"""Name of the reference in results; no variant can have it."""
REFERENCE_BYTES = BytesPerWeight(2.0, 2.0)


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
) -> JsonObject:
    """Measure policies of a merged checkpoint on a text file; return a JSON-able document.

    ``reference`` is the folder or Hugging Face id of the 16-bit model; without it only perplexity is
    measured. ``policies`` are variants, built-in policies, policy files and ``stored``; None: every variant
    and the checkpoint's default. ``questions`` are answered only if there is a reference; None: the questions
    that come with FlexQuant, empty: none. ``progress`` gets a line before each engine starts.

    The document's ``results`` hold one entry for each policy and batch size, the reference's first; an
    entry's ``quality`` has the fields of :class:`flexquant.evaluation.scores.Quality`. Raises FlexQuantError
    for a checkpoint, text, reference or policy that cannot be evaluated, before anything is measured.
    """
    settings = settings or Settings()
    prepare_environment()
    subject = Subject.open(checkpoint)
    subject.check_length(settings.row_tokens, "a prompt and its continuation")
    candidates = find_candidates(subject, policies)
    prompts: list[list[int]] = []
    if reference is not None:
        subject.check_reference(reference)
        if questions is None:
            questions = read_questions(None)
        prompts = question_prompts(list(questions), subject.tokenizer)
    longest = max(map(len, prompts), default=0) + settings.answer_tokens if prompts else 0
    subject.check_length(longest, "a question and its answer")
    smallest = settings.batch_sizes[0]
    questions_tokens = most_tokens(prompts, smallest) if prompts else None
    runs = make_schedule(
        candidates, subject, settings.batch_sizes, settings.prompt_tokens, settings.tokens, questions_tokens
    )
    rows = read_rows(text, subject.tokenizer, settings)

    evaluation = _Evaluation(subject, reference, settings, rows, prompts, longest, questions_tokens, progress)
    for batch_size in settings.batch_sizes:
        evaluation.measure([run for run in runs if run.batch_size == batch_size])
    return {
        "schema": SCHEMA,
        "checkpoint": folder_label(subject.folder),
        "reference": _label(reference),
        "settings": asdict(settings),
        "text": {"file": Path(text).name, "sha256": hash_file(Path(text))},
        "questions": len(prompts),
        "results": evaluation.results(candidates),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "argv": describe_command(),
    }


def _label(model: str | Path | None) -> str | None:
    """Return a folder's name, or a model's id as it is."""
    if model is None:
        return None
    return folder_label(Path(model)) if Path(model).is_dir() else str(model)


@dataclass
class _Evaluation:
    """Measures runs, and keeps their results by ``(policy, batch size)``."""

    subject: Subject
    reference: str | Path | None
    settings: Settings
    rows: list[list[int]]
    prompts: list[list[int]]
    """Token ids of the questions."""
    longest: int
    """Tokens of the longest question and its answer."""
    questions_tokens: int | None
    """Most tokens in a batch of questions."""
    progress: Callable[[str], None]
    runs: list[PolicyRun] = field(default_factory=list)
    quality: dict[tuple[str, int], Quality] = field(default_factory=dict)
    passes: dict[tuple[str, int], Passes] = field(default_factory=dict)
    answers: dict[str, list[TokenIds]] = field(default_factory=dict)

    def measure(self, runs: list[PolicyRun]) -> None:
        """Measure the reference and then the runs at one batch size."""
        self.runs += runs
        to_measure = [run for run in runs if run.needs_engine]
        if not to_measure:
            return
        batch_size = runs[0].batch_size
        options = engine_options(
            batch_size,
            self.settings.prompt_tokens,
            max(self.settings.row_tokens, self.longest),
            self.questions_tokens if runs[0].answers else None,
        )
        with tempfile.TemporaryDirectory(prefix="flexquant-eval-") as folder:
            stored, scores = None, None
            if self.reference is not None:
                stored = Path(folder, "reference")
                scores = self._measure_reference(self.reference, runs[0], options, stored)
            for run in to_measure:
                self._measure_policy(
                    run, options, Path(folder, f"policy-{run.candidate.name}"), stored, scores
                )

    def _measure_reference(
        self, reference: str | Path, run: PolicyRun, options: JsonObject, stored: Path
    ) -> Scores:
        """Run the 16-bit model in stock vLLM; store its log-probabilities of every step in ``stored``."""
        check_free_space(stored, 4 * len(self.rows) * self.settings.tokens * self.subject.vocab_size)
        batch_size = run.batch_size
        self.progress(f"{REFERENCE}, batch size {batch_size}")
        with engine(reference, **options) as llm:
            scores = decode_forced(
                llm,
                self.rows,
                self.settings.prompt_tokens,
                batch_size,
                stored.with_name("reference-scores"),
                store_in=stored,
            )
            if run.answers:
                self.answers[REFERENCE] = self._answer(llm, batch_size)
        self.quality[REFERENCE, batch_size] = summarise_scores(scores)
        return scores

    def _measure_policy(
        self, run: PolicyRun, options: JsonObject, folder: Path, stored: Path | None, reference: Scores | None
    ) -> None:
        """Run the merged checkpoint under the run's policy; score it and have it answer the questions."""
        name, batch_size = run.candidate.name, run.batch_size
        self.progress(f"{name}, batch size {batch_size}")
        folder.mkdir()
        policy, trace = folder / "policy.yaml", folder / "trace.jsonl"
        policy.write_text(yaml.safe_dump(run.candidate.policy.document))
        serving = {"policy": str(policy), "trace": str(trace)}
        with engine(self.subject.folder, flexquant=serving, **options) as llm:
            if run.same_as is None:
                scores = decode_forced(
                    llm, self.rows, self.settings.prompt_tokens, batch_size, folder, compare_with=stored
                )
                self.quality[name, batch_size] = summarise_scores(scores, reference)
                self.passes[name, batch_size] = Passes.from_trace(trace)
            if run.answers and run.answers_same_as is None:
                self.answers[name] = self._answer(llm, batch_size)

    def _answer(self, llm: LLM, batch_size: int) -> list[TokenIds]:
        return greedy_answers(llm, self.prompts, batch_size, self.settings.answer_tokens)

    def results(self, candidates: Sequence[Candidate]) -> list[JsonObject]:
        """Return one entry per batch size for the reference, then one per policy and batch size."""
        weights = LayerBytes(self.subject.checkpoint)
        reference = [
            {
                "policy": REFERENCE,
                "batch_size": batch_size,
                "quality": asdict(quality),
                "bytes_per_weight": asdict(REFERENCE_BYTES),
            }
            for (name, batch_size), quality in self.quality.items()
            if name == REFERENCE
        ]
        return reference + [
            self._result(run, weights)
            for candidate in candidates
            for run in self.runs
            if run.candidate is candidate
        ]

    def _result(self, run: PolicyRun, weights: LayerBytes) -> JsonObject:
        source = run.same_as or (run.candidate.name, run.batch_size)
        passes, batches = self.passes[source], self.settings.samples // run.batch_size
        decoding = batches * (self.settings.tokens - 1)
        result = {
            "policy": run.candidate.name,
            "batch_size": run.batch_size,
            "prefill_plan": run.prefill_plan.name,
            "decode_plan": run.decode_plan.name,
            "same_as": {"policy": source[0], "batch_size": source[1]} if run.same_as else None,
            "quality": asdict(self.quality[source]),
            "bytes_per_weight": asdict(weights.per_weight(run.routes, run.decode_plan)),
            "answers": None,
        }
        if run.same_as is None:
            result["passes"] = passes.to_data()
            result["deviations"] = passes.deviations(
                run.prefill_plan.name,
                {run.decode_plan.name: decoding} if decoding else {},
                run.batch_size,
                batches,
            )
        if run.answers:
            answered = run.answers_same_as or run.candidate.name
            agreement = compare_answers(self.answers[REFERENCE], self.answers[answered])
            result["answers"] = {**asdict(agreement), "same_as": run.answers_same_as}
        return result
