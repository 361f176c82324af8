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
        "arrival-beyond-any-number",
        "An arrival that no float can hold crashes the reader of a trace.",
        "flexquant/planning/trace.py",
        "not 0 <= arrival <= LATEST",
        "not 0 <= arrival < float('inf')",
        ("tests/unit/test_traces.py",),
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
    Fault(
        "scheduler-ignores-the-budget",
        "A simulated pass takes a waiting prompt whole, whatever the token budget.",
        "flexquant/planning/scheduler.py",
        "            tokens = min(sequence.length, budget)\n",
        "            tokens = sequence.length\n",
        ("tests/unit/test_scheduling.py::test_chunked_prefill_leaves_decode_its_token",),
    ),
    Fault(
        "padding-ignored",
        "A simulated pass costs its own tokens instead of those of its CUDA graph.",
        "flexquant/planning/server.py",
        "return next((size for size in self.capture_sizes if size >= tokens), tokens)",
        "return tokens",
        ("tests/unit/test_server_limits.py::test_the_padded_batch_size_decides",),
    ),
    Fault(
        "preempted-to-the-end",
        "A preempted sequence of the simulation waits behind all others instead of before them.",
        "flexquant/planning/scheduler.py",
        "self.waiting.appendleft(sequence)",
        "self.waiting.append(sequence)",
        ("tests/integration/test_simulated_schedule.py::test_passes_are_those_of_vllm",),
    ),
    Fault(
        "admission-by-the-first-chunk",
        "A simulated prompt is admitted when its first chunk fits into the KV cache.",
        "flexquant/planning/scheduler.py",
        "if blocks_of(sequence.length) > self.free_blocks:",
        "if blocks_of(min(sequence.length, budget)) > self.free_blocks:",
        (
            "tests/unit/test_scheduling.py::test_a_prompt_is_admitted_only_when_the_cache_has_room_for_all_of_it",
        ),
    ),
)
