# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in the comparison of layers that carry a state from token to token."""

from __future__ import annotations

from tests.faults.fault import Fault

STATES = "tests/unit/test_kv_states.py::"

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
)
