# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in the choice of kernels on a CPU."""

from __future__ import annotations

from tests.faults.fault import Fault

KERNELS = (
    Fault(
        "names-of-vllm-by-the-wrong-version",
        "A name that newer vLLMs lack is listed as if they had it.",
        "flexquant/serving/vllm_names.py",
        "until=(0, 29)",
        "since=(0, 29)",
        ("tests/unit/test_vllm_api.py",),
    ),
    Fault(
        "names-of-vllm-without-a-reason",
        "A private name of vLLM is imported without the change after which it can go.",
        "flexquant/serving/vllm_api.py",
        "    # Goes when vLLM asks a model, not its class, how images are read.\n",
        "",
        ("tests/unit/test_vllm_api.py",),
    ),
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
    Fault(
        "w4a8-of-asymmetric-weights",
        "A policy that derives W4A8 from asymmetric weights fails when its engine starts.",
        "flexquant/serving/worker/w4a8.py",
        'if weights.get("num_bits") != 4 or not weights.get("symmetric", True):',
        'if weights.get("num_bits") != 4:',
        ("tests/unit/test_w4a8_scales.py::test_weights_without_w4a8_are_refused_with_the_policy",),
    ),
    Fault(
        "scales-below-zero-not-told",
        "Nothing is known of scales below zero, which Marlin takes for large ones beside INT8 activations.",
        "merge/merging.py",
        "(load_tensor(ref).float() < 0)",
        "(load_tensor(ref).float() < -1)",
        ("tests/unit/test_w4a8_scales.py::test_merging_tells_of_scales_below_zero",),
    ),
)
