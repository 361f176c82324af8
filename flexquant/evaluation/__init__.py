# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Start engines, and measure what each policy of a merged checkpoint costs in quality; see README.md."""
