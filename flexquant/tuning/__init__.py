# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Behind `flexquant tune`: measure the variants here, and write the policy that follows; see README.md."""
