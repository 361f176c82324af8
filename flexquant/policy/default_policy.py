# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose the policy: the one that a user names, else the checkpoint's own, else the built-in default.

This module also finds the policies that a command compares, and the measured times that a policy holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError, UsageError
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.rules import Policy, builtin_policies, load_policy, parse_policy
from flexquant.policy.schema import SCHEMA

DEFAULT_POLICY = "phase-batch"
"""Built-in policy that is used if neither the user nor the checkpoint has one."""
STORED = "stored"
"""Name of a merged checkpoint's own policy in commands and results."""
STORED_SOURCE = "the checkpoint's policy"
"""Name of the checkpoint's own policy in messages."""


def choose_policy(given: str | None = None, stored: JsonObject | None = None) -> tuple[str, Policy]:
    """Return a name and the policy: ``given``, else ``stored``, else the default.

    ``given`` is a built-in policy's name or a policy file's path, ``stored`` the document in a merged
    checkpoint. Raises FlexQuantError for an unknown name, a file that cannot be read, and a document that
    breaks the schema.
    """
    if given is not None:
        return given, load_policy(given)
    if stored is not None:
        return STORED_SOURCE, parse_policy(dict(stored), STORED_SOURCE)
    return DEFAULT_POLICY, load_policy(DEFAULT_POLICY)


def find_measured(given: str | None, stored: JsonObject | None = None) -> tuple[PassTimes, str] | None:
    """Return the measured times of the policy that :func:`choose_policy` chooses, and the policy's name.

    None if the checkpoint's or the default policy has no times. Raises FlexQuantError if ``given`` has none.
    """
    name, policy = choose_policy(given, stored)
    if policy.measured is not None:
        return policy.measured, name
    if given is not None:
        raise FlexQuantError(
            f"{given} has no measured times (key 'measured'); give a policy that 'flexquant tune' wrote"
        )
    return None


def default_name(stored: JsonObject | None) -> str:
    """Return the name of serving's default policy for :func:`find_policies`."""
    return DEFAULT_POLICY if stored is None else STORED


def find_policies(
    names: Sequence[str],
    variants: Collection[str],
    folder: str | Path | None = None,
    stored: JsonObject | None = None,
) -> dict[str, Policy]:
    """Return the policies with the given names, each once, keyed by their names in results.

    A name is one of ``variants`` (which runs all passes), a built-in policy, a policy file, or ``stored``:
    the document in the checkpoint ``folder``. The name of a file in results is the last part of its path.
    Raises FlexQuantError for an unknown name and two files of one name.
    """
    policies: dict[str, Policy] = {}
    for text in dict.fromkeys(names):
        name, policy = _find(text, variants, folder, stored)
        if name in policies:
            raise UsageError(f"two policies are named '{name}'; rename one of the files")
        policies[name] = policy
    return policies


def _find(
    text: str, variants: Collection[str], folder: str | Path | None, stored: JsonObject | None
) -> tuple[str, Policy]:
    if text in variants:
        return text, parse_policy({"schema": SCHEMA, "rules": [{"use": text}]}, text)
    if text == STORED and folder is not None:
        if stored is None:
            raise FlexQuantError(f"{folder} stores no policy; its default is the built-in '{DEFAULT_POLICY}'")
        return STORED, choose_policy(None, stored)[1]
    try:
        policy = load_policy(text)
    except FlexQuantError as e:
        raise FlexQuantError(f"{e}; or a variant of the checkpoint: {', '.join(variants)}") from e
    return text if text in builtin_policies() else Path(text).name, policy
