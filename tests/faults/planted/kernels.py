# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in the choice of kernels on a CPU."""

from __future__ import annotations

from tests.faults.fault import Fault

ONE_COPY = "tests/integration/test_one_copy.py::"
FP8_WEIGHTS = (
    "tests/gpu/test_one_copy_marlin.py::test_8_bit_weights_are_those_of_the_packed_int4_weights"
    "[Qwen2.5-0.5B qkv-128-False-128-precision1]"
)

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
        "    # Goes when vLLM packs no embedding that is only looked up.\n",
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
    Fault(
        "int8-weights-beyond-127",
        "The greatest weight of a channel becomes 128 in INT8, which does not fit.",
        "flexquant/serving/cpu/one_copy.py",
        "greatest / 127",
        "greatest / 128",
        ("tests/unit/test_one_copy.py",),
    ),
    Fault(
        "fp8-weights-rounded-to-integers",
        "FP8 weights are rounded as INT8 weights are.",
        "flexquant/serving/worker/one_copy_marlin.py",
        "(exact + ROUNDS) - ROUNDS if is_integer else exact",
        "(exact + ROUNDS) - ROUNDS",
        (FP8_WEIGHTS,),
        "interpreter",
    ),
    Fault(
        "zero-points-added",
        "PyTorch's INT4 kernel adds zero points where it has to subtract them.",
        "flexquant/serving/cpu/int4.py",
        "(MIDDLE - middle)",
        "(middle - MIDDLE)",
        ("tests/unit/test_one_copy.py::test_zero_points_are_subtracted",),
    ),
    Fault(
        "zero-points-taken-for-8",
        "INT8 weights are computed from asymmetric INT4 weights as if they were symmetric.",
        "flexquant/serving/cpu/one_copy.py",
        "zero.data if self._kernel.config.zero_points and zero is not None else None",
        "None",
        (f"{ONE_COPY}test_a_published_checkpoint_is_served_as_it_is[awq]",),
    ),
    Fault(
        "one-copy-without-its-source",
        "A variant that computes its weights is built without the layers of the variant that has them.",
        "flexquant/policy/routes.py",
        "if not self.has_weights(variant):",
        "if False:",
        (f"{ONE_COPY}test_in_int8_it_answers_as_a_checkpoint_of_the_same_int8_weights",),
    ),
    Fault(
        "one-copy-loaded-twice",
        "The weights of a variant that computes them count as memory of its own.",
        "flexquant/serving/worker/weight_memory.py",
        "if name not in self._computed}",
        "}",
        (f"{ONE_COPY}test_it_is_served_from_one_copy_by_default",),
    ),
    Fault(
        "int8-weights-take-no-memory",
        "The memory that INT8 weights are computed into is not reported.",
        "flexquant/serving/worker/one_copy.py",
        "max((i * o for i, o in sizes), default=0)",
        "0",
        (f"{ONE_COPY}test_it_is_served_from_one_copy_by_default",),
    ),
    Fault(
        "one-copy-compiled-as-w4a8",
        "A plan that computes INT8 weights finds the compiled code of one that multiplies INT4 weights.",
        "flexquant/serving/worker/plan_views.py",
        "if derivation and derivation.is_one_copy else {}",
        "if False else {}",
        ("tests/unit/test_plan_digest.py",),
    ),
)
