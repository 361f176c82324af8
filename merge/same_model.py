# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find how two configs differ, apart from what different releases of transformers write differently."""

from __future__ import annotations

from typing import Any

from flexquant.checkpoint.known_models import known_config
from flexquant.checkpoint.model_config import ABSENT, JsonObject, config_differences


def model_differences(a: JsonObject, b: JsonObject) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value in a, value in b) of every difference; empty for two configs of one model.

    Releases of transformers differ in which default values they write. If one config lacks a key, the other's
    value, null included, is therefore compared with transformers' default. Raises FlexQuantError for a config
    that transformers refuses.
    """
    found = list(config_differences(a, b))
    if found and all(x is ABSENT or y is ABSENT for _, x, y in found):
        found = list(config_differences(_with_defaults(a), _with_defaults(b)))
    shown = [(key, _or_null(x), _or_null(y)) for key, x, y in found]
    return [(key, x, y) for key, x, y in shown if x is not None or y is not None]


def _or_null(value: Any) -> Any:
    return None if value is ABSENT else value


def _with_defaults(config: JsonObject) -> JsonObject:
    """Return the config with transformers' defaults filled in; unchanged if it does not know the model."""
    known = known_config(config, "config.json")
    return config if known is None else known.to_dict()
