# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune`: measure the variants on this machine, and write the policy that follows.

tuning       one run, from its checked inputs to the files that it writes
candidates   which variants are chosen among, the most precise first
rounds       measures a grid of sizes round by round, the variants in turn (with measuring.workers)
samples      the measured seconds, with medians and ratios; kept in a file until a run is finished
deciding     from samples to the variant of every size, in ranges, with the crossovers between them
objectives   what the decision optimises: latency, throughput, both in balance, or bounds on TTFT and TPOT
memory       how many requests fit into the device's memory beside the weights of given variants
notes        the sentences that tell what a policy rests on
traffic      which passes a live server has, and how long they take
retuning     the policy that follows from a live server's traffic and times that were measured before
policy_file  the policy as commented YAML; plot draws the times
"""
