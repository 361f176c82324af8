# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Starts engines and servers to measure them, times and compares them, and describes the machine."""
