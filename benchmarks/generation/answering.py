# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Have the 16-bit model and then every policy of a merged checkpoint answer the same prompts, greedily.

All policies take turns on one engine, as plans do in flexquant.sensitivity. Those that route every pass alike
up to the batch size give the same answers, which are generated once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.generation.arithmetic import arithmetic
from benchmarks.generation.instructions import instructions
from benchmarks.generation.task import Task, long, prompt_of
from flexquant.errors import FlexQuantError
from flexquant.evaluation.engine import engine, environment, prepare_environment, take_policy
from flexquant.evaluation.evaluating import REFERENCE
from flexquant.evaluation.inputs import Subject
from flexquant.evaluation.measure import TokenIds, engine_options, greedy_answers, most_tokens
from flexquant.evaluation.schedule import Passes, PolicyRun, find_candidates, make_schedule
from flexquant.policy.schema import SCHEMA

if TYPE_CHECKING:
    from vllm import LLM

KINDS: dict[str, Callable[[int, int], list[Task]]] = {
    "arithmetic": arithmetic,
    "instructions": instructions,
    "long": long,
}


@dataclass(frozen=True)
class Settings:
    tasks: Mapping[str, int]
    """Kind -> number of tasks, each at least 1."""
    tokens: Mapping[str, int]
    """Kind -> most tokens of an answer."""
    batch_size: int
    """Most prompts that are answered at once."""
    seed: int


@dataclass
class Answers:
    """What the 16-bit model and every policy answered, by kind and in the order of the tasks."""

    tasks: dict[str, list[Task]]
    prompts: dict[str, list[list[int]]]
    by_policy: dict[str, dict[str, list[TokenIds]]] = field(default_factory=dict)
    passes: dict[str, Passes] = field(default_factory=dict)
    same_as: dict[str, str | None] = field(default_factory=dict)
    """Policy -> the earlier policy that routes alike, whose answers it shares; None if there is none."""


def reference_again(settings: Settings) -> str:
    """Return the name of the 16-bit model's second answers, which it gives in smaller batches."""
    return f"{REFERENCE}, batches of {_smaller(settings)}"


def _smaller(settings: Settings) -> int:
    return max(1, settings.batch_size // 2)


# vLLM's second model runner has another interface for the logits processors of engine_options.
@environment(VLLM_USE_V2_MODEL_RUNNER="0")
def answer_all(
    subject: Subject,
    reference: str | Path,
    policies: Sequence[str],
    settings: Settings,
    progress: Callable[[str], None] = lambda message: None,
) -> Answers:
    """Return the answers of the 16-bit model, twice in batches of different size, and of every policy.

    How far the 16-bit model's answers depend on the batch is what a policy's have to be compared with.
    Raises FlexQuantError for a reference, policies or a length that do not fit, before anything is answered.
    """
    prepare_environment()
    subject.check_reference(reference)
    candidates = find_candidates(subject, policies)
    tasks = {kind: make(settings.tasks[kind], settings.seed) for kind, make in KINDS.items()}
    answers = Answers(
        tasks,
        {kind: [prompt_of(task, subject.tokenizer) for task in found] for kind, found in tasks.items()},
    )
    longest = check_length(subject, answers.prompts, settings.tokens)
    batch_tokens = max(most_tokens(prompts, settings.batch_size) for prompts in answers.prompts.values())
    runs = make_schedule(candidates, subject, (settings.batch_size,), 1, batch_tokens)
    options = {**engine_options(settings.batch_size, 1, longest, batch_tokens), "enforce_eager": True}

    def answer(llm: LLM, name: str, batch_size: int = settings.batch_size) -> None:
        progress(name)
        answers.by_policy[name] = {
            kind: greedy_answers(llm, prompts, batch_size, settings.tokens[kind])
            for kind, prompts in answers.prompts.items()
        }

    with engine(reference, **options) as llm:
        answer(llm, REFERENCE)
        answer(llm, reference_again(settings), _smaller(settings))
    with tempfile.TemporaryDirectory(prefix="flexquant-generation-") as folder:
        policy, trace = Path(folder, "policy.json"), Path(folder, "trace.jsonl")
        policy.write_text(json.dumps(policy_that_loads(runs)))
        serving = {"policy": str(policy), "trace": str(trace)}
        with engine(subject.folder, flexquant=serving, **options) as llm:
            for run in runs:
                name, same = run.name, run.answers_same_as
                answers.same_as[name] = same
                if same is None:
                    take_policy(llm, name, run.policy.document)
                    answer(llm, name)
                    answers.passes[name] = Passes.from_trace(trace)
                else:
                    answers.by_policy[name], answers.passes[name] = (
                        answers.by_policy[same],
                        answers.passes[same],
                    )
    return answers


def check_length(subject: Subject, prompts: Mapping[str, list[list[int]]], tokens: Mapping[str, int]) -> int:
    """Return the most tokens of a prompt and its answer; FlexQuantError if the model takes fewer."""
    lengths = {kind: max(map(len, found)) + tokens[kind] for kind, found in prompts.items()}
    kind = max(lengths, key=lengths.__getitem__)
    if subject.max_length is not None and lengths[kind] > subject.max_length:
        option = "--long-tokens" if kind == "long" else "--answer-tokens"
        raise FlexQuantError(
            f"a prompt of the kind '{kind}' and its answer take {lengths[kind]} tokens, but the model's "
            f"max_position_embeddings is {subject.max_length}; lower {option} ({tokens[kind]}), or take a "
            "model with a longer context"
        )
    return lengths[kind]


def policy_that_loads(runs: Sequence[PolicyRun]) -> dict[str, Any]:
    """Return the policy to start with, under which an engine loads every variant of the runs' policies."""
    variants = list(dict.fromkeys(v for run in runs for plan in run.routes.plans for v in plan.variants))
    derived: dict[str, Any] = {}
    for run in runs:
        derived |= run.policy.document.get("derive", {})
    *few, last = variants
    rules = [{"when": {"tokens": {"max": tokens}}, "use": variant} for tokens, variant in enumerate(few, 1)]
    return {"schema": SCHEMA, **({"derive": derived} if derived else {}), "rules": [*rules, {"use": last}]}
