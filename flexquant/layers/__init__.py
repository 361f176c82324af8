# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which layer needs which precision: `flexquant sensitivity` measures it, and `flexquant search` chooses.

sensitivity         runs one plan after another on one engine, and measures its KL divergence to a reference
budget              limits what a plan may cost, and chooses the best measured plan within the limit
plan_losses         tells what plans lose, from a file of `flexquant sensitivity`
fitting             chooses how many layers have two copies, so that the weights fit into a memory
searching           runs a search: measures layers alone, proposes plans, measures these whole, and chooses
limiting            changes a tuned policy where a variant loses too much
sensitivity_report  computes differences between plans with their intervals, as a table and a plot
search_report       writes the measured plans as a table and a plot, and the policy
"""
