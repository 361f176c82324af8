# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes documents that are nearly right: a sound one with some values exchanged, removed or moved.

Random bytes hardly ever get past a parser; these documents reach the code that reads the values behind it.
"""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import yaml

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *(3, 8, 1024.0, "1e-6", "re:(", "group", "F16", [16, 16], [0, 16], [16], "\udaff"),
    *("", "x", "w8a8", "decode", "0-3", "-1", "../../etc/passwd", "/etc/passwd", "a\nb", "\0", "\ud7ff" * 40),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["w8a8", "w4a16"]),
    *({"min": 3, "max": 2}, {"max": 0}),
)
STRUCTURED_HEADER = "safetensors_header"
"""A target whose document stands between its length and the data."""


def read(target: str, data: bytes) -> Any:
    """Return the document in an input; raises ValueError or YAMLError where there is none."""
    if target == STRUCTURED_HEADER:
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return yaml.safe_load(data)


def write(target: str, document: Any, seed: random.Random) -> bytes:
    """Return an input that holds a document."""
    text = json.dumps(document).encode()
    if target == STRUCTURED_HEADER:
        return len(text).to_bytes(8, "little") + text + bytes(seed.choice([0, 1, 2, 24, 32]))
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document except the whole document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutate(document: Any, seed: random.Random) -> Any:
    """Return a document with one to three changes."""
    document = copy.deepcopy(document)
    for _ in range(seed.randint(1, 3)):
        paths = list(places(document))
        if not paths:
            return seed.choice(ODD)
        path = seed.choice(paths)
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        what = seed.randrange(4)
        if what == 0:
            del holder[path[-1]]
        elif what == 1 and isinstance(holder, dict):
            holder[str(seed.choice(ODD))] = holder[path[-1]]
        elif what == 2:
            other: Any = document
            for key in seed.choice(paths):
                if not isinstance(other, (dict, list)) or (isinstance(other, list) and key >= len(other)):
                    break
                other = other.get(key) if isinstance(other, dict) else other[key]
            holder[path[-1]] = copy.deepcopy(other)
        else:
            holder[path[-1]] = copy.deepcopy(seed.choice(ODD))
    return document


def mutated(target: str, data: bytes, number: int) -> bytes | None:
    """Return an input whose document was changed as ``number`` draws; None if the input holds none."""
    seed = random.Random(number)
    try:
        return write(target, mutate(read(target, data), seed), seed)
    except (ValueError, yaml.YAMLError, RecursionError, TypeError, OverflowError):
        return None
