# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Kernels chosen on a CPU."""

from __future__ import annotations

from tests.faults.fault import Fault

KERNELS = (
    Fault(
        "kernels-of-another-machine-believed",
        "A kernel that was the fastest for another layer, or on another machine, is taken.",
        "flexquant/serving/cpu/remembering.py",
        'if found["key"] == key and found["chosen"]',
        'if found["chosen"]',
        ("tests/unit/test_cpu_choosing.py",),
    ),
    Fault(
        "kernels-tried-with-the-sizes-of-prefill",
        "A variant's kernels are tried with as many tokens as prompts have, also where it decodes.",
        "flexquant/serving/cpu/choosing.py",
        "(in_others | in_decode).items()",
        "(in_decode | in_others).items()",
        ("tests/unit/test_cpu_choosing.py",),
    ),
)
