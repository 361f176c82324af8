# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant sensitivity`: what each decoder layer costs in the lower precision, and wins in the higher.

measuring  one engine that is given one plan after another, and their KL divergence to a reference
report     differences between plans with their intervals, as a table and a plot
"""
