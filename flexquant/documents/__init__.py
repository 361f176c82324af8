# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Files that people write and FlexQuant reads: by name or path, with the line of every key."""
