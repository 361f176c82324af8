# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What each kept result depends on (the table is in flexquant/README.md): every part is in its key."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def assert_whole(
    key: Callable[..., Any], changes: Sequence[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that every change makes another key, and that every part of the key is changed by one of them.

    ``changes`` are arguments of ``key``, or with a dot in the name what is patched, and their other values.
    """
    found = [_plain(key())]
    for name, value in changes:
        with monkeypatch.context() as patch:
            if "." in name:
                patch.setattr(name, value)
            found.append(_plain(key(**({} if "." in name else {name: value}))))
    alike = [change for change, one in zip(changes, found[1:], strict=True) if found.count(one) > 1]
    assert not alike and found[0] == _plain(key()), alike
    assert {part for one in found for part in one if one[part] != found[0].get(part)} >= set(found[0])


def _plain(key: Any) -> Any:
    return json.loads(json.dumps(key))
