# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every decoder-only architecture of vLLM: which of them FlexQuant merges and serves."""
