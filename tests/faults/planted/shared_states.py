# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in the serving of layers that keep a state."""

from __future__ import annotations

from tests.faults.fault import Fault

STATES = "tests/integration/test_states.py::"
GOES_ON = STATES + "test_a_variant_goes_on_from_the_state_that_another_wrote"
DERIVED = STATES + "test_a_derived_variant_computes_with_its_own_linears_on_the_same_state"

SHARED_STATES = (
    Fault(
        "two-states",
        "The second variant's layers have a state of their own, in groups of the KV cache of their own.",
        "flexquant/serving/worker/state_layers.py",
        "        share_state(layer, variant, context)\n    elif",
        '        layer.prefix = f"{name}@{variant}"\n        context[layer.prefix] = layer\n    elif',
        (GOES_ON + "[eager-qwen3_next]",),
    ),
    Fault(
        "blocks-of-another-layer",
        "The second variant's layers find their states where the first layer of all has its own.",
        "flexquant/serving/worker/state_layers.py",
        "            found.setdefault(own_name(name), []).append(name)\n",
        "            found.setdefault(own_name(next(iter(context))), []).append(name)\n",
        (GOES_ON + "[eager-qwen3_next]",),
    ),
    Fault(
        "layers-of-the-first-variant",
        "vLLM finds the first variant's layer for all variants.",
        "flexquant/serving/worker/state_layers.py",
        '    layer.prefix = f"{name}{APART}{variant}"\n    context[layer.prefix] = layer\n',
        "",
        (STATES + "test_pure_plans_equal_stock_vllm_and_layered_plans_run[lfm2]",),
    ),
    Fault(
        "states-unknown-to-vllm",
        "vLLM is not told that a merged model's layers keep states.",
        "flexquant/serving/registration.py",
        "{key: getattr(base, key) for key in STATES}",
        "{}",
        (GOES_ON + "[eager-qwen3_next]",),
    ),
    Fault(
        "convolutions-of-the-source",
        "A derived variant's layers take the source's convolution, and keep views of one that is not loaded.",
        "flexquant/serving/worker/w4a8.py",
        "        and not is_state_layer_or_its_convolution(module)\n",
        "",
        (STATES + "test_a_derived_variant_has_its_own_convolutions",),
    ),
    Fault(
        "views-that-vllm-does-not-find",
        "vLLM finds the source's layers for a variant that computes its weights from the source's.",
        "flexquant/serving/worker/variants.py",
        "        share_states_of_view(variants[name], name, real_context)\n",
        "",
        (DERIVED + "[lfm2-one-copy]",),
    ),
    Fault(
        "adapters-for-states",
        "LoRA is taken for models whose layers keep states.",
        "flexquant/serving/refusals.py",
        "lora_config is not None and vllm_config.model_config.has_inner_state",
        "lora_config is not None and vllm_config.model_config.is_attention_free",
        ("tests/integration/test_serving_errors.py::test_features_that_layers_with_a_state_lack",),
    ),
    Fault(
        "captures-into-states",
        "The passes of a capture on the way write into the states of requests.",
        "flexquant/serving/worker/graphs.py",
        "        table.zero_()\n",
        "        pass\n",
        ("tests/gpu/test_states.py::test_a_capture_on_the_way_leaves_the_states_of_requests_alone[V1]",),
    ),
)
