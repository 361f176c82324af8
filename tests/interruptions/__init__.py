# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Commands killed, or their disk filled up, at random moments: what they leave is whole, and the same command
again finishes it."""
