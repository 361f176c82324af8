# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant search`: choose a precision for each layer in decode, under a budget of quality, time or layers.

chain      proposes plans by raising one layer after another to a higher precision
budget     limits what a plan may cost, and chooses the best measured plan within the limit
searching  runs a search: measures layers alone and whole plans, and chooses
limiting   changes a tuned policy where a variant loses too much
report     writes the measured plans as a table and a plot, and the policy
"""
