# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in comparing layers that carry a state from token to token, and in recipes for them."""

from __future__ import annotations

from tests.faults.fault import Fault

STATES = "tests/unit/test_kv_states.py::"
RECIPES = "tests/unit/test_recipe_states.py::"

IN_STATES = (
    Fault(
        "slow-differences-unseen",
        "What a state is computed with may differ by what shows after thousands of tokens only.",
        "merge/kv/layer_comparison.py",
        'use = IN_A_STATE if name in self._of_states else ""',
        'use = ""',
        (STATES + "test_a_difference_that_shows_after_many_tokens_only_is_refused",),
    ),
    Fault(
        "rows-of-one-forgetful-head",
        "Which rows reach a state is told by one layer alone, whose heads may forget too fast to show it.",
        "merge/kv/layer_pass.py",
        "    if of_states:\n",
        "    if False:\n",
        (STATES + "test_a_gate_is_compared_though_another_layers_head_forgets_at_once",),
    ),
    Fault(
        "recurrent-states-not-compared",
        "Of what a layer writes, K, V and the convolution's inputs are compared, but no recurrent state.",
        "merge/kv/written_cache.py",
        '        self._keep((RECURRENT + (f" {state_idx}" if state_idx else ""), recurrent_states))\n',
        "",
        (STATES + "test_rows_that_reach_the_recurrent_state_alone_are_held_to_its_bounds",),
    ),
    Fault(
        "convolved-inputs-not-compared",
        "What a short convolution keeps of its inputs is not compared.",
        "merge/kv/written_cache.py",
        '        self._keep((CONVOLVED + (f" {state_idx}" if state_idx else ""), conv_states))\n',
        "",
        (STATES + "test_scales_do_not_move_into_a_short_convolution",),
    ),
    Fault(
        "rotated-layers-end-at-the-first-write",
        "In a rotated stream only the first tensor that a layer writes is compared.",
        "merge/kv/skeleton.py",
        "Written(self._config, writes if until_cached else None)",
        "Written(self._config, 1 if until_cached else None)",
        (STATES + "test_a_rotated_residual_stream_shares_states_but_not_layers",),
    ),
    Fault(
        "unseen-states-merged",
        "A state that transformers does not keep in its cache is merged unseen.",
        "merge/kv/variant_weights.py",
        "if INDEXER in name or (STATE.search(name) and not self._skeleton.keeps_state(layer)):",
        "if INDEXER in name:",
        (STATES + "test_a_state_that_transformers_does_not_keep_is_refused",),
    ),
    Fault(
        "gates-of-states-quantised",
        "Recipes quantise the gates of a state, which vLLM and publishers keep in 16 bit.",
        "flexquant/quantization/resolve.py",
        "    left = [name for name in gates(model) if name in matched - asked]\n",
        "    left: list[str] = []\n",
        (RECIPES + "test_gates_of_states_stay_in_16_bit_and_large_projections_do_not",),
    ),
    Fault(
        "norm-not-folded-into-gates",
        "Scales move out of a norm into the large projections in front of a state, but not into its gates.",
        "flexquant/quantization/architecture.py",
        r"linear_attn\.in_proj_\w+|",
        r"linear_attn\.in_proj_qkv\w*|",
        (RECIPES + "test_scales_move_from_the_first_norm_into_all_that_reads_it",),
    ),
    Fault(
        "state-smoothed-away",
        "A recipe may move scales out of the projection in front of a state.",
        "flexquant/quantization/kv_safety.py",
        '    "linear_attn.in_proj_qkvz": "scales the state",\n',
        "",
        ("tests/unit/test_kv_safety.py::test_the_reason_names_the_shared_cache_only_where_k_or_v_change",),
    ),
    Fault(
        "convolutions-quantised",
        "A recipe may quantise the convolution that writes a state.",
        "flexquant/quantization/kv_safety.py",
        'if target == "Conv1d" or any(_may_match(name, target) for name in _CONVOLUTIONS):',
        "if False:",
        ("tests/unit/test_kv_safety.py::test_convolutions_that_write_a_state_are_no_targets",),
    ),
)
