# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What each policy of a merged checkpoint costs in quality, measured through vLLM."""
