# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Linear kernels for CPUs: the fastest of those there are, and some where vLLM has none that is right."""
