# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The recipes that ship with FlexQuant, each a YAML file that can be copied and changed."""
