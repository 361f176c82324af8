# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The vLLM plugin: variants side by side over one KV cache, and a plan for every forward pass."""
