# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The doctor's way to write what it has found."""

from __future__ import annotations

from flexquant.doctor import Finding


def test_a_mark_tells_what_could_be_better_from_what_does_not_serve() -> None:
    marks = {level: Finding(level, "memory", "text").line() for level in ("ok", "note", "problem")}
    assert marks == {"ok": "  memory     text", "note": "! memory     text", "problem": "X memory     text"}
