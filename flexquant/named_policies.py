# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The policies that a command compares: variants, built-in policies, files, and the checkpoint's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError, UsageError
from flexquant.policy import DEFAULT_POLICY, SCHEMA, Policy, builtin_policies, load_policy, parse_policy

STORED = "stored"
"""Name of the policy that a merged checkpoint carries."""


def find_policies(
    names: Sequence[str],
    variants: Collection[str],
    folder: str | Path | None = None,
    stored: Mapping[str, Any] | None = None,
) -> dict[str, Policy]:
    """Return the policies with the given names, each once, by what results call them.

    A name is one of ``variants`` (all passes in it), a built-in policy, a policy file, or ``stored``: the
    document that the checkpoint ``folder`` carries. Results call a file by its last part. Raises
    FlexQuantError for an unknown name and two files of one name.
    """
    policies: dict[str, Policy] = {}
    for text in dict.fromkeys(names):
        name, policy = _find(text, variants, folder, stored)
        if name in policies:
            raise UsageError(f"two policies are named '{name}'; rename one of the files")
        policies[name] = policy
    return policies


def _find(
    text: str, variants: Collection[str], folder: str | Path | None, stored: Mapping[str, Any] | None
) -> tuple[str, Policy]:
    if text in variants:
        return text, parse_policy({"schema": SCHEMA, "rules": [{"use": text}]}, text)
    if text == STORED and folder is not None:
        if stored is None:
            raise FlexQuantError(f"{folder} stores no policy; its default is the built-in '{DEFAULT_POLICY}'")
        return STORED, parse_policy(dict(stored), "the checkpoint's policy")
    try:
        policy = load_policy(text)
    except FlexQuantError as e:
        raise FlexQuantError(f"{e}; or a variant of the checkpoint: {', '.join(variants)}") from e
    return text if text in builtin_policies() else Path(text).name, policy
