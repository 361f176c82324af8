# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How one next-token distribution compares with another: the scores of a single position."""

from __future__ import annotations

import torch


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities [vocabulary] in nats and fp32 of logits [vocabulary] of any dtype."""
    return logits.float().log_softmax(dim=-1)


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(reference || other) in nats, a scalar, of two log-probability vectors [vocabulary].

    A token that the reference rules out (-inf) adds nothing, whatever the other says.
    """
    terms = reference.exp() * (reference - other)
    return torch.where(reference == -torch.inf, 0.0, terms).sum()


def same_top_token(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether both give the same token the highest probability, a scalar bool."""
    return reference.argmax() == other.argmax()
