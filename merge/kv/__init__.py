# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Decide whether variants can share one KV cache, and whether one plan can mix their layers."""
