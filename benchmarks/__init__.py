# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What FlexQuant costs and gains: speed (`python -m benchmarks`), merging and quality (scripts)."""
