# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A policy that several tests write into a file."""

THRESHOLD = """
schema: flexquant.policy/v1
rules:
  - when: {phase: decode, batch_size: {max: 4}}
    use: w4a16
  - use: w8a8
"""
