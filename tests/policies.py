# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policies that several tests write into a file, and how to write more."""

import re

THRESHOLD = """
schema: flexquant.policy/v1
rules:
  - when: {phase: decode, batch_size: {max: 4}}
    use: w4a16
  - use: w8a8
"""
SWITCHING = """
schema: flexquant.policy/v1
rules:
  - when: {phase: [prefill, mixed]}
    use: w8a8
  - when: {phase: decode, batch_size: {max: 1}}
    use: w4a16
  - use: {default: w4a16, layers: {"0": w8a8}}
"""
LAYERED_DECODE = """
schema: flexquant.policy/v1
rules:
  - when: {phase: decode}
    use: {default: w8a8, layers: {"0": w4a16}}
  - use: w8a8
"""
FLOOR = """
schema: flexquant.policy/v1
rules:
  - when: {phase: decode, since_prompt: {max: 3}}
    use: w8a8
  - when: {phase: decode}
    use: w4a16
  - use: w8a8
"""
TRIGGERED = """
schema: flexquant.policy/v1
experimental:
  trigger: {signal: entropy, aggregate: mean, enter: 2.5, leave: 1.5, dwell: 2}
rules:
  - when: {phase: decode, unsure: true}
    use: w8a8
  - when: {phase: decode}
    use: w4a16
  - use: w8a8
"""


def triggered(**settings: float) -> str:
    """Return ``TRIGGERED`` with other settings; the dwell is one pass if it is not given."""
    given = ", ".join(f"{key}: {value!r}" for key, value in {"dwell": 1, **settings}.items())
    return re.sub("enter: .*}", f"{given}}}", TRIGGERED)


def scheduled(pattern: str) -> str:
    """Return ``TRIGGERED`` with a schedule in the trigger's place."""
    return re.sub("trigger: .*", f'trigger: {{schedule: "{pattern}"}}', TRIGGERED)


def rules(*lines: str) -> str:
    """Return a policy whose rules start in line 3."""
    return "\n".join(["schema: flexquant.policy/v1", "rules:", *(f"  {line}" for line in lines), ""])
