# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant search`: which layers of decoding stay in which precision, under a budget of quality or time.

chain      plans in which one layer after another is raised to a higher precision
budget     what a plan may cost, and the best of the measured ones that keeps to it
searching  one run: layer by layer, whole plans, the choice
report     the measured plans as a table and a plot, and the policy
"""
