# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune`: measure the variants on this machine, and write the policy that follows.

workers    one process a variant, each an engine as `vllm serve` would start it (pass_timer times it)
measuring  rounds over a grid of sizes, the variants in turn -> samples
samples    medians, intervals, ties
deciding   the variant of every size, crossovers; objectives: what is to be optimal
tuning     the whole way; policy_file and plot write it down, where output says
"""
