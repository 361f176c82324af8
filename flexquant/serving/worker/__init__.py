# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What runs in every worker: variants, plans and graphs are built, passes are routed and recorded."""
