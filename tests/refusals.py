# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Expect that bad input is refused, with a message for its user."""

import pytest

from flexquant.errors import FlexQuantError


def refused(message: str) -> pytest.RaisesExc[FlexQuantError]:
    """Return a block that must raise FlexQuantError, with a match of the regular expression ``message``."""
    return pytest.raises(FlexQuantError, match=message)
