# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Speed and memory against stock vLLM: `python -m benchmarks --help`.

The way through: `settings` (how much) -> `shapes` and `synthetic` (or real checkpoints) -> `models` (folders)
-> `subjects` (what is compared) -> `rounds` (which cells, and how often) -> `servers`, `peers` (what answers)
-> `kernels`, `serving` (measure) -> `results` (one line a cell) -> `comparing` (what noise leaves open) ->
`tables`, `report`. `live_policies` compares policies on one server that runs already.
"""
