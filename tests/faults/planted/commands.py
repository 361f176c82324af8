# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in the command line, building, the doctor, and how measurements are reported."""

from __future__ import annotations

from tests.faults.fault import Fault

COMMANDS = (
    Fault(
        "wrong-usage-as-failure",
        "Wrong usage ends as a failure does, with 1 instead of 2.",
        "flexquant/cli/__init__.py",
        "return 2 if isinstance(e, UsageError) else 1",
        "return 1",
        ("tests/unit/test_merge.py::test_command_line",),
    ),
    Fault(
        "plan-of-another-moment",
        "The table of times names the plan of the passes right after a prompt.",
        "flexquant/cli/policy.py",
        "if row.phase == phase and row.span.is_calm)",
        "if row.phase == phase)",
        ("tests/unit/test_cli_policy.py::test_show_tells_the_times_of_calm_passes",),
    ),
    Fault(
        "default-policy-not-checked",
        "A recipe whose variants the default policy cannot use is quantised for hours first.",
        "flexquant/build.py",
        "if policy is None and len(recipe.variants) == 1:",
        "if policy is None:",
        ("tests/quantize/test_build.py::test_the_default_policy_is_one_that_the_recipe_can_serve",),
        "quantize",
    ),
    Fault(
        "variants-in-another-order",
        "A build goes on with a checkpoint whose variants stand in another order.",
        "flexquant/build.py",
        "if list(merged.variants) != list(variants):",
        "if set(merged.variants) != set(variants):",
        ("tests/quantize/test_build.py::test_a_finished_checkpoint_has_the_variants_in_the_recipes_order",),
        "quantize",
    ),
    Fault(
        "marks-exchanged",
        "The doctor marks what does not serve as what could be better.",
        "flexquant/doctor/findings.py",
        '"note": "!", "problem": "X"',
        '"note": "X", "problem": "!"',
        ("tests/unit/test_findings.py::test_a_mark_tells_what_could_be_better_from_what_does_not_serve",),
    ),
    Fault(
        "zero-points-not-foretold",
        "The doctor forgets the zero points that PyTorch's INT4 kernel keeps beside the scales.",
        "flexquant/doctor/memory.py",
        "        _add_zero_points(model)",
        "        pass",
        (
            "tests/integration/test_doctor.py::test_scales_count_with_the_zero_points_that_pytorchs_kernel_keeps_beside_them",
        ),
    ),
    Fault(
        "experts-taken-for-attention",
        "The doctor asks experts for the backend of their attention.",
        "flexquant/doctor/memory.py",
        "return [layer for layer in registered if isinstance(layer, AttentionLayerBase)]",
        "return [*registered]",
        ("tests/integration/test_doctor.py::test_experts_are_no_attention_layers",),
    ),
    Fault(
        "ranks-with-whole-layers",
        "The doctor tells the shapes of whole layers, however many ranks share them.",
        "flexquant/doctor/examining.py",
        "group.world_size, group.ranks = size, list(range(size))",
        "group.ranks = list(range(size))",
        ("tests/integration/test_doctor.py::test_tensor_parallel_ranks_have_their_share_of_every_shape",),
    ),
    Fault(
        "paths-of-a-machine-published",
        "Results hold whole paths of the machine on which they were measured.",
        "flexquant/measuring/machine.py",
        "Path(argument).name if Path(argument).is_absolute() else argument",
        "argument",
        ("tests/unit/test_machine.py::test_a_command_tells_nothing_of_where_its_files_lie",),
    ),
    Fault(
        "environment-overruled",
        "A server that is measured has a KV cache of 1 GiB, whatever the environment says.",
        "flexquant/measuring/server.py",
        'return {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}',
        'return {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}',
        ("tests/unit/test_machine.py::test_a_server_takes_what_the_environment_says",),
    ),
)
