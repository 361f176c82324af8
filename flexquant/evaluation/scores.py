# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compute the scores of a token from logits, and the quality of a policy from the scores of all tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

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


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities, fp32 [vocabulary] in nats, of logits [vocabulary] of any dtype."""
    return logits.float().log_softmax(dim=-1)


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(reference || other) in nats, a scalar, of two log-probability vectors [vocabulary].

    A token that the reference rules out (-inf) adds nothing.
    """
    terms = reference.exp() * (reference - other)
    return torch.where(reference == -torch.inf, 0.0, terms).sum()


def same_top_token(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether both give the same token the highest probability, a scalar bool."""
    return reference.argmax() == other.argmax()


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
