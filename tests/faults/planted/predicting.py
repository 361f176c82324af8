# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in predicting and simulating."""

from __future__ import annotations

from tests.faults.fault import Fault

PREDICTING = (
    Fault(
        "logits-of-every-token",
        "The lm_head is counted for every token of a prompt.",
        "flexquant/planning/roofline.py",
        'sequences = size if phase == "decode" else 1',
        "sequences = size",
        ("tests/unit/test_devices.py::test_a_pass_by_hand",),
    ),
    Fault(
        "one-layers-overhead",
        "What a layer takes beside its linears is counted once a pass.",
        "flexquant/planning/roofline.py",
        "model.num_layers * device.layer_seconds",
        "device.layer_seconds",
        ("tests/unit/test_devices.py::test_a_pass_by_hand",),
    ),
    Fault(
        "tiles-in-the-order-of-the-file",
        "Tiles hold up to so many tokens in the order in which a file gives them.",
        "flexquant/planning/device.py",
        "tuple(sorted(tiles, key=lambda tile: tile.tokens))",
        "tuple(tiles)",
        ("tests/unit/test_devices.py::test_tiles_may_be_given_in_any_order",),
    ),
    Fault(
        "own-kernel-ignored",
        "A device's own kernel for 8-bit weights is ignored.",
        "flexquant/planning/device.py",
        'if scheme == "w8a16" and scheme not in self.kernels:',
        'if scheme == "w8a16":',
        ("tests/unit/test_devices.py::test_8_bit_weights_take_their_own_kernel_or_that_of_w4a16",),
    ),
    Fault(
        "part-of-a-kv-head",
        "More devices than there are KV heads each hold a part of one.",
        "flexquant/planning/model_shape.py",
        'max(1, (config.get("num_key_value_heads") or heads) / tensor_parallel_size)',
        '(config.get("num_key_value_heads") or heads) / tensor_parallel_size',
        ("tests/unit/test_model_shape.py::test_a_device_holds_one_kv_head_at_least",),
    ),
    Fault(
        "errors-of-the-slowest",
        "A prediction is compared with the slowest of the measured times.",
        "flexquant/planning/predicting.py",
        "seconds / time.median\n",
        "seconds / time.high\n",
        ("tests/unit/test_predict.py::test_errors_are_those_of_the_medians",),
    ),
    Fault(
        "report-of-whole-answers",
        "A report counts the context of requests at their end instead of half way.",
        "flexquant/planning/prediction_report.py",
        "input_tokens + output_tokens // 2",
        "input_tokens + output_tokens",
        ("tests/unit/test_predict.py::test_a_report_is_of_requests_that_are_half_answered",),
    ),
    Fault(
        "percentile-mistaken",
        "What is called the 99th percentile is the 90th.",
        "flexquant/planning/simulation_report.py",
        "np.percentile(milliseconds, (50, 99))",
        "np.percentile(milliseconds, (50, 90))",
        ("tests/unit/test_simulate.py::test_the_slowest_of_a_hundred_decides_the_99th_percentile",),
    ),
    Fault(
        "simulated-prompts-in-decode-overlooked",
        "A simulated decode pass with a prompt's last token does not begin the count anew.",
        "flexquant/planning/replaying.py",
        "count_since_prompt(since_prompt, phase_of(batch), holds_prompt(batch))",
        "count_since_prompt(since_prompt, phase_of(batch), False)",
        ("tests/unit/test_simulate.py::test_the_first_passes_after_a_prompt_take_the_rule_for_them",),
    ),
)
