# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which layer needs which precision: `flexquant sensitivity` measures it, and `flexquant search` chooses.

sensitivity  runs one plan after another on one engine, and measures its KL divergence to a reference
searching    measures layers alone, proposes plans, measures these whole, and chooses within a budget
memory_fit   chooses how many layers have two copies, so that the weights fit into a memory
report       writes differences between plans with their intervals, the measured plans, and the policy
"""
