# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in CUDA graphs, and in changes of the policy while a server runs."""

from __future__ import annotations

from tests.faults.fault import Fault

REPLAYS = "tests/gpu/test_replays.py::test_every_replay_is_of_the_plan_that_the_trace_names"
CHANGES = "tests/gpu/test_policy_change.py::"
COUNTS = "tests/gpu/test_counts.py::test_steps_tokens_and_sequences_are_the_schedulers"

GRAPHS = (
    Fault(
        "warm-up-taken-for-serving",
        "vLLM's own requests, before it captures CUDA graphs, count as the first that are served.",
        "flexquant/serving/worker/model_states.py",
        "observer.is_of_vllm = any(map(OF_VLLM.fullmatch, input_batch.req_ids))",
        "pass",
        (REPLAYS + "[V2-PIECEWISE-by-batch]",),
        "interpreter",
    ),
    Fault(
        "reachable-plan-not-captured",
        "Of the plans that a size can take, only the first has PIECEWISE graphs.",
        "flexquant/serving/worker/graphs.py",
        "        for name in reachable:\n",
        "        for name in [*reachable][:1]:\n",
        (REPLAYS + "[V1-PIECEWISE-by-batch]",),
    ),
    Fault(
        "other-plans-not-warmed-up",
        "A pass in which vLLM tunes kernels runs one plan of its size, and leaves out the others.",
        "flexquant/serving/worker/model.py",
        "            self._warm_up_others(plan.name, tokens, inputs)\n",
        "",
        (
            "tests/gpu/test_plans_in_graphs.py::test_vllms_own_passes_run_every_plan_that_their_size_can_take[V1]",
        ),
    ),
    Fault(
        "graphs-of-two-sizes-exchanged",
        "The FULL graph of a size holds the plan of another.",
        "flexquant/serving/worker/model.py",
        "        plan = self.routes.lookup(forward_pass.phase, forward_pass.tokens, forward_pass.moment)\n",
        "        other = 1 if self.observer.is_serving else 2\n"
        "        plan = self.routes.lookup(forward_pass.phase, other * forward_pass.tokens)\n",
        (REPLAYS + "[V1-FULL_DECODE_ONLY-by-batch]",),
    ),
    Fault(
        "device-read-in-forward",
        "The model waits for a value of the device, which no CUDA graph can hold.",
        "flexquant/serving/worker/model.py",
        "        tokens = positions.shape[-1]\n",
        "        tokens = positions.shape[-1] + 0 * int(positions.sum())\n",
        (REPLAYS + "[V1-FULL_DECODE_ONLY-by-batch]",),
    ),
    Fault(
        "replays-not-counted",
        "A pass that is replayed from a FULL graph is in no counter of /metrics.",
        "flexquant/serving/worker/pass_records.py",
        "        if self._metrics is not None:\n            self._metrics.count_pass(",
        "        if self._metrics is not None and graph != CUDAGraphMode.FULL:\n"
        "            self._metrics.count_pass(",
        (COUNTS + "[V1-FULL_DECODE_ONLY]",),
    ),
    Fault(
        "batches-between-engines-counted",
        "A batch that keeps data-parallel engines in step is in the counters of /metrics.",
        "flexquant/serving/worker/model_states.py",
        r"|req_\d+_[0-9a-f]+",
        "",
        (
            "tests/gpu/test_counts.py::test_batches_that_keep_data_parallel_engines_in_step_are_not_counted"
            "[V2-PIECEWISE]",
        ),
        "interpreter",
    ),
    Fault(
        "full-graphs-outlive-a-policy",
        "Another policy is taken without other FULL graphs, whatever plans they hold.",
        "flexquant/serving/worker/graphs.py",
        "return all(routes.lookup(*cell).name == plan for cell, plan in self._full.items()) and all(",
        "return all(",
        (CHANGES + "test_every_replay_is_of_the_plan_that_the_policy_gives[FULL_DECODE_ONLY-V1]",),
    ),
    Fault(
        "pieces-not-captured-for-a-policy",
        "Another policy is taken without the PIECEWISE graphs that only it needs.",
        "flexquant/serving/worker/graphs.py",
        "            for plan in routes.reachable(size.num_tokens)\n",
        "            for plan in routes.reachable(size.num_tokens)[:0]\n",
        (CHANGES + "test_every_replay_is_of_the_plan_that_the_policy_gives[PIECEWISE-V1]",),
    ),
    Fault(
        "pieces-of-a-failed-capture-stay",
        "A plan of which some pieces were captured before one failed counts as captured.",
        "flexquant/serving/worker/graphs.py",
        "            for size in wrapper.concrete_cudagraph_entries.keys() - kept:\n",
        "            for size in kept - kept:\n",
        (CHANGES + "test_pieces_of_a_capture_that_failed_are_captured_the_next_time[V1]",),
    ),
    Fault(
        "graphs-asked-for-that-no-capture-made",
        "Where the graphs of the policy before cannot be captured again, passes ask for them all the same.",
        "flexquant/serving/worker/live_policy.py",
        "                self._graphs.do_without(runner)\n",
        "",
        (CHANGES + "test_where_no_capture_succeeds_passes_run_without_graphs[V1]",),
    ),
    Fault(
        "last-replay-told-by-the-next-policy",
        "A replay before a change of the policy is counted for the plan that it would have had after it.",
        "flexquant/serving/worker/live_policy.py",
        "            self._model.observer.settle()\n            missing = [",
        "            missing = [",
        (CHANGES + "test_a_replay_before_the_change_counts_for_the_policy_before[V1]",),
    ),
    Fault(
        "graphs-of-one-moment",
        "Of the plans that a size takes at several moments, the last moment's alone has PIECEWISE graphs.",
        "flexquant/policy/routes.py",
        "                for span in self.spans(phase)\n",
        "                for span in self.spans(phase)[-1:]\n",
        ("tests/gpu/test_moments.py::test_every_replay_is_of_the_plan_of_its_moment[V1]",),
    ),
)
