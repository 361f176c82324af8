# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policies that several tests write into a file, and how to write more."""

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


DERIVE_INT8 = "derive: {w8a8-from-int4: {from: w4a16, activations: int8, weights: int8}}\n"


def rules(*lines: str) -> str:
    """Return a policy whose rules start in line 3."""
    return "\n".join(["schema: flexquant.policy/v1", "rules:", *(f"  {line}" for line in lines), ""])
