# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From a policy document to the table that gives every forward pass its plan. Neither torch nor vLLM."""
