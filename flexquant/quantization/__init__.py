# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantise a 16-bit model into its variants, by a recipe, with llmcompressor's modifiers.

README.md says which module does what, in the order of the data. Reading a recipe needs no llmcompressor.
"""
