# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One name for one content, whatever the order of its keys."""

from __future__ import annotations

import hashlib
import json


def digest_of(document: object) -> str:
    """Return the SHA-256, in hexadecimal, of data that JSON can hold."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
