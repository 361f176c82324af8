# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Turn a policy document into the table that gives every forward pass its plan, without torch or vLLM."""
