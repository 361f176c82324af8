# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The policies to evaluate: variants, built-in policies, files, and the checkpoint's default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.subject import Subject
from flexquant.policy import (
    DEFAULT_POLICY,
    SCHEMA,
    Policy,
    builtin_policies,
    load_policy,
    parse_policy,
)
from flexquant.routes import RouteTable, build_route_table

STORED = "stored"
"""Name of the policy that a merged checkpoint carries."""


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
    candidates: dict[str, Candidate] = {}
    for text in dict.fromkeys(names):
        candidate = _find(text, subject)
        if candidate.name in candidates:
            raise UsageError(f"two policies are named '{candidate.name}'; rename one of the files")
        candidates[candidate.name] = candidate
    return list(candidates.values())


def _find(text: str, subject: Subject) -> Candidate:
    merged = subject.checkpoint.merged
    if text in merged.variants:
        return Candidate(text, parse_policy({"schema": SCHEMA, "rules": [{"use": text}]}, text))
    if text == STORED:
        if merged.policy is None:
            raise FlexQuantError(
                f"{subject.folder} stores no policy; its default is the built-in '{DEFAULT_POLICY}'"
            )
        return Candidate(STORED, parse_policy(merged.policy, "the checkpoint's policy"))
    try:
        policy = load_policy(text)
    except FlexQuantError as e:
        raise FlexQuantError(f"{e}; or a variant of the checkpoint: {', '.join(merged.variants)}") from e
    return Candidate(text if text in builtin_policies() else Path(text).name, policy)
