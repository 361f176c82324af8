# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in what a policy document means."""

from __future__ import annotations

from tests.faults.fault import Fault

RUNNING = "tests/unit/test_running_moments.py::"
TRIGGER = "tests/unit/test_trigger.py::"

POLICY = (
    Fault(
        "batch-size-max-exclusive",
        "A rule's 'max' leaves out the batch of exactly that size.",
        "flexquant/policy/ranges.py",
        "self.max * unit + 1",
        "self.max * unit",
        ("tests/unit/test_routes.py::test_lookup_at_the_edges",),
    ),
    Fault(
        "single-size-never-matches",
        "A rule for one size alone, with 'max' equal to 'min', takes no pass.",
        "flexquant/policy/ranges.py",
        "self.max is None or number <= self.max",
        "self.max is None or number < self.max",
        ("tests/unit/test_routes.py::test_a_rule_for_one_size_alone",),
    ),
    Fault(
        "last-layer-left-out",
        "A range of layers in a policy ends one layer early.",
        "flexquant/policy/routes.py",
        "return range(first, last + 1)",
        "return range(first, max(last, first + 1))",
        ("tests/unit/test_routes.py::test_layers_of_the_layered_builtin",),
    ),
    Fault(
        "prompts-do-not-reset-the-count",
        "Decode passes are counted from the first prompt, not from the last.",
        "flexquant/policy/moments.py",
        "        return 0\n",
        "        return before\n",
        ("tests/unit/test_moments.py::test_decode_passes_are_counted_from_the_last_prompt",),
    ),
    Fault(
        "last-token-of-a-prompt-ignored",
        "A prompt whose last token is computed in a decode pass has no floor.",
        "flexquant/policy/moments.py",
        "return 1 if holds_prompt else before + 1",
        "return before + 1",
        (RUNNING + "test_a_prompt_of_which_one_token_was_left_begins_the_count",),
    ),
    Fault(
        "floor-one-pass-short",
        "The rule for the first passes after a prompt leaves out the last of them.",
        "flexquant/policy/routes.py",
        "bisect_right(self._starts, moment.since_prompt)",
        "bisect_right(self._starts, moment.since_prompt + 1)",
        ("tests/unit/test_moments.py::test_the_first_passes_after_a_prompt_take_the_rule_for_them",),
    ),
    Fault(
        "dwell-ignored",
        "A trigger turns on and off again from one pass to the next, however long it is to stay.",
        "flexquant/policy/trigger.py",
        "if turns and self._stayed >= self._trigger.dwell:",
        "if turns:",
        (TRIGGER + "test_it_stays_as_it_is_for_as_many_passes_as_it_dwells",),
    ),
    Fault(
        "leave-ignored",
        "A trigger turns off where it turned on, without hysteresis.",
        "flexquant/policy/trigger.py",
        "signal < self._trigger.leave if",
        "signal < self._trigger.enter if",
        (TRIGGER + "test_it_turns_on_at_enter_and_off_below_leave",),
    ),
    Fault(
        "no-number-is-sure",
        "Logits that are no numbers leave a pass in the lower precision.",
        "flexquant/policy/trigger.py",
        "not signal < self._trigger.enter",
        "signal >= self._trigger.enter",
        (TRIGGER + "test_what_is_no_number_is_unsure",),
    ),
    Fault(
        "signal-read-at-once",
        "A pass waits for the signal of the pass before it, which the device may still compute.",
        "flexquant/serving/worker/trigger_signal.py",
        "while len(self._sent) > 1:",
        "while self._sent:",
        (RUNNING + "test_a_pass_follows_from_all_decode_passes_but_the_one_before_it",),
    ),
    Fault(
        "each-rank-for-itself",
        "A rank takes its own signal, not that of the first.",
        "flexquant/serving/worker/trigger_signal.py",
        "self._send(get_tp_group().broadcast(signal))",
        "self._send(signal)",
        (RUNNING + "test_a_rank_without_logits_takes_the_signal_of_the_first",),
    ),
    Fault(
        "prompts-measured-too",
        "The logits of a prompt are taken for those of a decode pass.",
        "flexquant/serving/worker/trigger_signal.py",
        "self._has_begun, self._is_due = True, is_decode",
        "self._has_begun, self._is_due = True, True",
        (RUNNING + "test_a_pass_follows_from_all_decode_passes_but_the_one_before_it",),
    ),
    Fault(
        "decode-bounds-all-phases",
        "The largest decode batch bounds prompts too, so that larger ones take the plan of that size.",
        "flexquant/policy/routes.py",
        'if phase == "decode" and max_decode_tokens is not None:',
        "if max_decode_tokens is not None:",
        ("tests/unit/test_routes.py::test_the_largest_decode_batch_bounds_decode_alone",),
    ),
    Fault(
        "first-layer-not-from-the-end",
        "A policy cannot name the first layer as counted from the end.",
        "flexquant/policy/routes.py",
        "if not -num_layers <= layer < num_layers:",
        "if not -num_layers < layer < num_layers:",
        ("tests/unit/test_routes.py::test_the_first_layer_counts_from_the_end_too",),
    ),
)
