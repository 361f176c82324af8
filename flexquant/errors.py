# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The one exception for mistakes that a user can mend."""


class FlexQuantError(Exception):
    """Bad input: the message says what was found, what is allowed and what to do, in one sentence."""


class UsageError(FlexQuantError):
    """A command line that contradicts itself in a way argparse cannot see (exit code 2)."""
