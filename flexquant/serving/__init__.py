# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Implement the vLLM plugin: several variants over one KV cache, and a plan for every forward pass."""
