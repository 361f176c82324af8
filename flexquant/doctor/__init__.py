# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant doctor`: check how ``vllm serve`` would run a merged checkpoint, without loading weights."""
