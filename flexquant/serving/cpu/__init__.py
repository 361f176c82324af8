# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Linear kernels for CPUs on which vLLM's own are missing or wrong."""
