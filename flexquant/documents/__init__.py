# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Files that people write and FlexQuant reads: by name or path, with the line of every key."""

import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
"""Most lists and mappings inside one another in a file; functions that walk through one call themselves."""
TOO_DEEP = f"it has more than {MAX_DEPTH} lists and mappings inside one another"


def parse_json(text: str | bytes, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what JSON says, objects by ``pairs_hook``; raise ValueError for other text, or deep nesting."""
    try:
        data = json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError as e:
        raise ValueError(TOO_DEEP) from e
    level: list[Any] = [[data]]
    for _ in range(MAX_DEPTH + 1):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for values in inside for one in values if isinstance(one, dict | list)]
        if not level:
            return data
    raise ValueError(TOO_DEEP)
