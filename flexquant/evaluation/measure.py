# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure a policy on an engine, one batch at a time: scores of forced continuations, and greedy answers.

Each row of text has a prompt, which is prefilled, and a continuation, which is forced; the scores of the
forced tokens are read back. Answers are compared with the reference's, token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from vllm import LLM

Item = TypeVar("Item")
PROCESSOR = "flexquant.evaluation.forced_decoding:ForcedDecoding"
EXTRA_ARGS_KEY = "flexquant_evaluation"
"""The key of vLLM's ``extra_args`` under which a request says how it is scored."""


@dataclass(frozen=True)
class Scores:
    """Scores of every forced token, each array [rows, tokens]; the prefill pass predicts position 0."""

    nll: np.ndarray
    """Negative log-likelihood of the text's token, in nats."""
    kl: np.ndarray | None = None
    """KL(reference || policy) in nats; None without a reference."""
    same_top: np.ndarray | None = None
    """Whether policy and reference agree on the likeliest token; None without a reference."""


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(reference || other) in nats, of log-probabilities [vocabulary]; -inf adds nothing."""
    return torch.where(reference == -torch.inf, 0.0, reference.exp() * (reference - other)).sum()


@dataclass(frozen=True)
class Quality:
    """Statistics over all forced tokens; None if they need a reference, or, for errors, a second row.

    Tokens of one row depend on each other, so standard errors are taken over the rows' means.
    """

    tokens: int
    rows: int
    perplexity: float
    """Exponential of ``log_perplexity``."""
    log_perplexity: float
    """Mean negative log-likelihood of a forced token, in nats."""
    log_perplexity_difference: float | None
    """Log-perplexity minus that of the reference on the same tokens, in nats."""
    log_perplexity_difference_error: float | None
    """Standard error of that difference, in nats."""
    mean_kl: float | None
    """Mean over all tokens of KL(reference || policy), in nats."""
    mean_kl_error: float | None
    """Standard error of that mean, in nats."""
    p99_kl: float | None
    """99th percentile of the tokens' KL divergences, in nats."""
    first_token_kl: float | None
    """Mean KL divergence, in nats, of the first token of each row, which the prefill pass predicts."""
    top1_agreement: float | None
    """Share of the tokens for which policy and reference have the same likeliest token."""


def summarise_scores(scores: Scores, reference: Scores | None = None) -> Quality:
    """Summarise a policy's scores; ``reference`` are the reference's scores on the same rows."""
    log_perplexity = float(scores.nll.astype(np.float64).mean())
    difference = None if reference is None else scores.nll.astype(np.float64) - reference.nll
    kl = None if scores.kl is None else scores.kl.astype(np.float64)
    return Quality(
        tokens=scores.nll.size,
        rows=scores.nll.shape[0],
        perplexity=math.exp(log_perplexity),
        log_perplexity=log_perplexity,
        log_perplexity_difference=None if difference is None else float(difference.mean()),
        log_perplexity_difference_error=None if difference is None else standard_error(difference),
        mean_kl=None if kl is None else float(kl.mean()),
        mean_kl_error=None if kl is None else standard_error(kl),
        p99_kl=None if kl is None else float(np.quantile(kl, 0.99)),
        first_token_kl=None if kl is None else float(kl[:, 0].mean()),
        top1_agreement=None if scores.same_top is None else float(scores.same_top.mean()),
    )


def standard_error(values: np.ndarray) -> float | None:
    """Return the standard error of the mean of ``values`` [rows, tokens], over rows; None for one row."""
    means = values.mean(axis=1)
    return None if len(means) < 2 else float(means.std(ddof=1) / math.sqrt(len(means)))


def engine_options(
    batch_size: int, prompt_tokens: int, max_model_len: int, batch_tokens: int | None = None
) -> JsonObject:
    """Return vLLM options under which every batch is prefilled in one pass and decoded at its full size.

    ``batch_tokens``: most prompt tokens in a batch, if more than ``batch_size * prompt_tokens``.
    """
    from vllm.platforms import current_platform

    most = max(batch_size * prompt_tokens, batch_tokens or 0)
    # Goes once a GPU has shown that the trace counts the passes of full CUDA graphs too.
    graphs = {} if current_platform.is_cpu() else {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    return {
        **graphs,
        "max_num_seqs": batch_size,
        "max_num_batched_tokens": max(most, max_model_len),
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,
        "async_scheduling": False,  # ForcedDecoding counts the generated tokens, which must be up to date
        "logits_processors": [PROCESSOR],
        "use_tqdm_on_load": False,
    }


def decode_forced(
    llm: LLM,
    rows: list[list[int]],
    prompt_tokens: int,
    batch_size: int,
    folder: Path,
    *,
    store_in: Path | None = None,
    compare_with: Path | None = None,
) -> Scores:
    """Prefill the first ``prompt_tokens`` ids of each row and force the others; return their scores.

    ``llm`` was made with :func:`engine_options`. ``folder`` is for files of scores. ``store_in`` is a folder
    to write log-probabilities into, ``compare_with`` a folder that the reference has filled so.
    """
    from vllm import SamplingParams, TokensPrompt

    for folder_to_fill in filter(None, (folder, store_in)):
        folder_to_fill.mkdir(parents=True, exist_ok=True)

    def parameters(row: int) -> SamplingParams:
        files = {"store_in": store_in, "compare_with": compare_with}
        options = {name: str(of / f"{row}.npy") if of else None for name, of in files.items()}
        options["scores"] = str(folder / f"{row}.npz")
        forced = rows[row][prompt_tokens:]
        extra_args = {EXTRA_ARGS_KEY: {**options, "forced": forced}}
        return SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=len(forced), extra_args=extra_args
        )

    for batch in batches(range(len(rows)), batch_size):
        prompts = [TokensPrompt(prompt_token_ids=rows[row][:prompt_tokens]) for row in batch]
        outputs = llm.generate(prompts, [parameters(row) for row in batch], use_tqdm=False)
        for row, output in zip(batch, outputs, strict=True):
            if list(output.outputs[0].token_ids) != rows[row][prompt_tokens:]:
                problem = "vLLM did not follow the forced tokens, so nothing can be measured with it"
                advice = "evaluate with vLLM 0.32's V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0)"
                raise FlexQuantError(f"{problem}; {advice}")
    return _read_scores([folder / f"{row}.npz" for row in range(len(rows))])


def _read_scores(files: list[Path]) -> Scores:
    columns: dict[str, list[np.ndarray]] = {}
    for file in files:
        with np.load(file) as arrays:
            for name in arrays.files:
                columns.setdefault(name, []).append(arrays[name])
    return Scores(**{name: np.stack(arrays) for name, arrays in columns.items()})


TokenIds = list[int]
"""Token ids of an answer, the end-of-text token included if it ended with one."""


@dataclass(frozen=True)
class AnswerAgreement:
    """How far greedy answers agree with the reference's."""

    questions: int
    identical: int
    """Number of answers equal to the reference's, token by token."""
    matched: float
    """Mean share of the reference's answer before the first difference, 0 to 1."""


def batches(items: Sequence[Item], batch_size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), batch_size):
        yield items[start : start + batch_size]


def most_tokens(prompts: list[list[int]], batch_size: int) -> int:
    """Return the most tokens that the prompts of one batch have."""
    return max(sum(map(len, batch)) for batch in batches(prompts, batch_size))


def greedy_answers(llm: LLM, prompts: list[list[int]], batch_size: int, answer_tokens: int) -> list[TokenIds]:
    """Return the model's greedy answer to each prompt, one batch at a time."""
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(temperature=0, max_tokens=answer_tokens, detokenize=False)
    found = []
    for batch in batches(prompts, batch_size):
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in batch]
        outputs = llm.generate(inputs, parameters, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


def compare_answers(reference: Sequence[TokenIds], answers: Sequence[TokenIds]) -> AnswerAgreement:
    """Compare the answers to the same questions, in the same order."""
    pairs = list(zip(reference, answers, strict=True))
    alike = [len([*takewhile(lambda ids: ids[0] == ids[1], zip(a, b, strict=False))]) for a, b in pairs]
    shares = [count / max(1, len(a)) for count, a in zip(alike, reference, strict=True)]
    return AnswerAgreement(len(pairs), sum(a == b for a, b in pairs), sum(shares) / len(shares))
