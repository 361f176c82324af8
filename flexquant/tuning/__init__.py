# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune`: measure the variants on this machine, and write the policy that follows.

tuning        runs the steps, from checking the inputs to writing the files
candidates    finds the variants to choose among, the most precise first
rounds        measures a grid of sizes round by round, the variants in turn
samples       holds the measured seconds, and keeps them in a file until a run is finished
deciding      chooses the variant for every size, in ranges, with the crossovers between them
objectives    sets what the decision optimises: latency, throughput, both, or bounds on TTFT and TPOT
traffic       reads how many passes a live server has run, and how long they took
retuning      makes a policy from a live server's traffic and from times that were measured before
policy_file   writes the policy as YAML, after sentences that say what it is based on; draws the times
"""
