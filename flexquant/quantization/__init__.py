# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From one 16-bit model to its quantised variants, by a recipe, through llmcompressor's modifiers.

The data's way: `recipe` (a YAML document, checked by `vocabulary` and `kv_safety`) meets a model
(`source_model`, `architecture`) in `resolve`, and becomes llmcompressor's modifiers in `modifiers`;
`calibration` cuts text into rows; `oneshot` runs llmcompressor with our own modifiers among its: `smoothing`
and `sensitivity`, which search what the recipe leaves open, and `gptq`. `report` writes down what was
found, and `variants` does it all, once per variant. Only `oneshot`, `modifiers` and our own modifiers need
llmcompressor.
"""
