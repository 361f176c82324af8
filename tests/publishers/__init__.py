# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Small pairs of checkpoints as publishers ship them, and the page of what becomes of each."""
