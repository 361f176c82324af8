# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do two configs describe one model, though different releases of transformers wrote them?"""

from __future__ import annotations

from typing import Any

from flexquant.checkpoint.known_models import known_config
from flexquant.checkpoint.model_config import ABSENT, JsonObject, config_differences


def model_differences(a: JsonObject, b: JsonObject) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value, value) for all that differs; empty for two configs of one model.

    A key that only one of them has, be it null there, is compared with the value that transformers gives it
    by default: releases differ in which of the defaults they write. Raises FlexQuantError for a config that
    transformers refuses.
    """
    found = list(config_differences(a, b))
    if found and all(x is ABSENT or y is ABSENT for _, x, y in found):
        found = list(config_differences(_with_defaults(a), _with_defaults(b)))
    shown = [(key, _or_null(x), _or_null(y)) for key, x, y in found]
    return [(key, x, y) for key, x, y in shown if x is not None or y is not None]


def _or_null(value: Any) -> Any:
    return None if value is ABSENT else value


def _with_defaults(config: JsonObject) -> JsonObject:
    """Return a config with all that transformers fills in; unchanged for a model that it does not know."""
    known = known_config(config, "config.json")
    return config if known is None else known.to_dict()
