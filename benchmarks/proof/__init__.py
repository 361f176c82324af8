# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`python -m benchmarks prove`: what FlexQuant claims, tried on the user's own machine in half an hour."""
