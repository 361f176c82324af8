# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Built-in traces, shipped as package data; ``benchmarks.arrivals`` made them."""
