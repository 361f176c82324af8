# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantise a 16-bit model into its variants, by a recipe, with llmcompressor's modifiers.

`quantizing` runs all steps, once per variant. `recipe` reads a YAML document, which `vocabulary` and
`kv_safety` check. `resolve` adapts it to a model (`source_model`, `architecture`), and `modifiers` makes
llmcompressor's modifiers of it. `calibration_rows` cuts text into rows. `oneshot` runs llmcompressor with its
modifiers and our own: `smoothing` and `sensitivity`, which search the recipe's open choices, and `gptq`.
`report` records the findings. Only `oneshot`, `modifiers` and our own modifiers need llmcompressor.
"""
