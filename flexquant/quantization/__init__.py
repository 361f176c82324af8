# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From one 16-bit model to its quantised variants, through llmcompressor's modifiers."""
