# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose linear kernels on CPUs, and provide some where vLLM's own are missing or wrong."""
