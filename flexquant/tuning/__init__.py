# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune`: measure the variants on this machine, and write the policy that follows.

README.md says which module does what, in the order of the data.
"""
