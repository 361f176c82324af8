# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What ``vllm serve`` would make of a merged checkpoint on this machine, without loading weights."""
