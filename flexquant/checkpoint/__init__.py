# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read checkpoint folders without trusting them, and write them all or nothing, without vLLM."""
