# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure which layer needs which precision (`flexquant sensitivity`), and choose (`flexquant search`)."""
