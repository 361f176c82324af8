# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The policies to evaluate: variants, built-in policies, files, and the checkpoint's default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexquant.errors import UsageError
from flexquant.evaluation.subject import Subject
from flexquant.named_policies import STORED, find_policies
from flexquant.policy import DEFAULT_POLICY, Policy
from flexquant.routes import RouteTable, build_route_table


@dataclass(frozen=True)
class Candidate:
    name: str
    """In results: a variant, a built-in policy, a file's name, or ``stored``."""
    policy: Policy

    def routes(self, subject: Subject, max_tokens: int, max_sequences: int) -> RouteTable:
        """The route table that serving builds; raises FlexQuantError for a policy that does not fit."""
        return build_route_table(
            self.policy,
            variants=list(subject.checkpoint.merged.variants),
            num_layers=subject.num_layers,
            max_tokens=max_tokens,
            layered_plans_allowed=subject.checkpoint.merged.layered_plans,
            max_sequences=max_sequences,
        )


def find_candidates(subject: Subject, names: Sequence[str] | None) -> list[Candidate]:
    """Return the policies with the given names, each once.

    None: every variant, and the policy that serving takes by default. A name is a variant of the checkpoint
    (all passes in it), a built-in policy, a policy file, or ``stored``. Raises FlexQuantError for an unknown
    name and two files of one name.
    """
    variants = list(subject.checkpoint.merged.variants)
    if names is None:
        names = [*variants, DEFAULT_POLICY if subject.checkpoint.merged.policy is None else STORED]
    if not names:
        raise UsageError("no policy is given; name some, e.g. --policies w8a8,w4a16,phase")
    policies = find_policies(names, variants, subject.folder, subject.checkpoint.merged.policy)
    return [Candidate(name, policy) for name, policy in policies.items()]
