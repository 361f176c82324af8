# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantise a 16-bit model by a recipe. Reading a recipe needs no llmcompressor. See README.md."""
