# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compute a digest of JSON-able data that does not depend on the order of keys."""

from __future__ import annotations

import hashlib
import json


def digest_of(document: object) -> str:
    """Return the SHA-256 of JSON-able data, in hexadecimal."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
