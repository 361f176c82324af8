# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoint folders on disk: read without trust, written all or nothing. No vLLM."""
