# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in tuning, on engines of its own and by a live server's traffic."""

from __future__ import annotations

from tests.faults.fault import Fault

TUNE, RETUNE, TRAFFIC, FIT = (
    f"tests/unit/test_{name}.py::" for name in ("tune", "retuning", "traffic", "fitting")
)

TUNING = (
    Fault(
        "engines-not-summed",
        "Of a server's engines the last alone is counted.",
        "flexquant/tuning/traffic.py",
        "found[name, *told] += value",
        "found[name, *told] = value",
        (TRAFFIC + "test_the_traffic_since_the_start_is_that_of_all_engines",),
    ),
    Fault(
        "watched-since-the-start",
        "Passes from before the watch are counted.",
        "flexquant/tuning/traffic.py",
        "            cumulative[plan, phase][float(end)] -= value\n",
        "            pass\n",
        (TRAFFIC + "test_what_was_served_before_the_watch_is_left_out",),
    ),
    Fault(
        "seconds-since-the-start",
        "The time of passes from before the watch is counted.",
        "flexquant/tuning/traffic.py",
        "seconds[plan, phase] = value - before.get(",
        "seconds[plan, phase] = value - 0 * before.get(",
        (TRAFFIC + "test_what_was_served_before_the_watch_is_left_out",),
    ),
    Fault(
        "mixed-pass-told-by-decode",
        "What a mixed pass would take is told by the variant chosen for decode.",
        "flexquant/tuning/retuning.py",
        'decision.variant("decode" if cell.phase == "decode" else "prefill", cell.size)',
        'decision.variant("prefill" if cell.phase == "prefill" else "decode", cell.size)',
        (RETUNE + "test_a_mixed_pass_would_take_the_variant_for_prefill",),
    ),
    Fault(
        "context-not-scaled",
        "The cost of context stays as it was measured, whatever a live server takes.",
        "flexquant/tuning/retuning.py",
        "self.times.context_seconds * max(ratios.values())",
        "self.times.context_seconds",
        (RETUNE + "test_the_cost_of_context_grows_with_the_live_times",),
    ),
    Fault(
        "unloaded-variant-proposed",
        "Nobody says that a proposed variant is not loaded.",
        "flexquant/tuning/retuning.py",
        "if v not in self.traffic.variants]",
        "if v not in self.times.variants]",
        (RETUNE + "test_a_variant_that_the_server_has_not_loaded_needs_a_restart",),
    ),
    Fault(
        "one-variant-always-first",
        "In all rounds the same variant is measured first, on a machine that has rested.",
        "flexquant/tuning/rounds.py",
        "self._names[:: -1 if number % 2 else 1]",
        "self._names",
        (TUNE + "test_the_variants_take_turns_at_being_measured_first",),
    ),
    Fault(
        "context-cost-of-all-tokens",
        "The cost of a longer context is taken for that of one token.",
        "flexquant/tuning/rounds.py",
        "return (long - short) / (grid.long_context - grid.context)",
        "return long - short",
        (TUNE + "test_the_variants_take_turns_at_being_measured_first",),
    ),
    Fault(
        "noisy-samples-kept",
        "A run after one that was too noisy decides by the same samples.",
        "flexquant/tuning/tuning.py",
        "                    self._samples.forget(phase, size)\n",
        "                    pass\n",
        (TUNE + "test_sizes_that_are_too_noisy_are_measured_anew",),
    ),
    Fault(
        "memory-of-one-device",
        "Of several devices the memory of one counts.",
        "flexquant/tuning/tuning.py",
        "UTILIZATION * devices * current",
        "UTILIZATION * current",
        (TUNE + "test_the_memory_of_all_devices_counts",),
    ),
    Fault(
        "one-copy-counted-twice",
        "A variant that computes its weights counts as a second copy of its source.",
        "flexquant/tuning/tuning.py",
        "for v, layers in routes.layers.items() if routes.has_weights(v)}",
        "for v, layers in routes.layers.items()}",
        (TUNE + "test_one_copy_is_counted_once",),
    ),
    Fault(
        "layers-of-a-plan-not-written",
        "A rule names a measured plan as if it were a variant.",
        "flexquant/tuning/policy_file.py",
        'rules.append({"use": uses[r.variant]})',
        'rules.append({"use": r.variant})',
        (TUNE + "test_a_measured_plan_is_written_with_its_layers_and_without_its_times",),
    ),
    Fault(
        "first-set-however-slow",
        "Of the variants that fit into memory together the first are taken, even if others are faster.",
        "flexquant/tuning/objectives.py",
        "if time <= least + MARGIN)",
        "if time >= least)",
        (TUNE + "test_of_sets_that_fit_the_first_is_taken_unless_another_is_faster",),
    ),
    Fault(
        "derived-from-nothing",
        "A variant derived from one that the checkpoint lacks ends in a KeyError.",
        "flexquant/tuning/candidates.py",
        "if source not in merged.variants:",
        "if derivation is None and source not in merged.variants:",
        (TUNE + "test_a_variant_derived_from_what_is_not_there_is_refused",),
    ),
    Fault(
        "memory-not-kept",
        "All layers get W8A8 of their own, whatever fits.",
        "flexquant/layers/fitting.py",
        "if loaded.of(choice.plans) <= memory]",
        "]",
        (FIT + "test_as_many_layers_as_fit_have_their_own",),
    ),
    Fault(
        "computed-from-nothing",
        "A plan that computes its weights counts without those that it computes them from.",
        "flexquant/doctor/loaded_bytes.py",
        "for variant, layer in used if variant in self.sources}",
        "for variant, layer in used if variant in ()}",
        (FIT + "test_what_is_computed_takes_the_weights_that_it_is_computed_from",),
    ),
    Fault(
        "least-sensitive-layers-first",
        "The layers that lose least get W8A8 of their own.",
        "flexquant/layers/fitting.py",
        "key=losses.costs.__getitem__, reverse=True)",
        "key=losses.costs.__getitem__)",
        (FIT + "test_the_layers_that_lose_most_come_first",),
    ),
    Fault(
        "interpolated-told-as-measured",
        "The table does not tell which times were measured.",
        "flexquant/layers/fitting.py",
        "{'' if is_measured else '~'}",
        "",
        (FIT + "test_the_table_tells_measured_times_from_interpolated_ones",),
    ),
    Fault(
        "losses-of-another-checkpoint",
        "Layers are chosen by what another checkpoint loses.",
        "flexquant/layers/plan_losses.py",
        '"files": dict(sizes)}',
        '"files": found["files"]}',
        (FIT + "test_a_file_that_says_nothing_of_these_layers_is_refused",),
    ),
)
