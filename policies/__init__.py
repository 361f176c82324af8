# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Built-in policies, shipped as package data: each YAML file is a policy usable by its name."""
