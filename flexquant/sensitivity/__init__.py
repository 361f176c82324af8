# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant sensitivity`: measure what each decoder layer costs in a lower precision and gains in a higher.

measuring  runs one plan after another on one engine, and measures its KL divergence to a reference
plans      writes plans as the variants of their layers
report     computes differences between plans with their intervals, as a table and a plot
"""
