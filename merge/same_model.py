# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do two configs describe one model, though different releases of transformers wrote them?"""

from __future__ import annotations

from typing import Any

from flexquant.checkpoint.model_config import JsonObject, config_differences


def model_differences(a: JsonObject, b: JsonObject) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value, value) for all that differs; empty for two configs of one model.

    A key that only one of them has is compared with the value that transformers gives it by default:
    releases differ in which of the defaults they write.
    """
    found = list(config_differences(a, b))
    if found and all(x is None or y is None for _, x, y in found):
        return list(config_differences(_with_defaults(a), _with_defaults(b)))
    return found


def _with_defaults(config: JsonObject) -> JsonObject:
    """Return a config with all that transformers fills in; unchanged for a model that it does not know."""
    from transformers import AutoConfig

    written = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        return AutoConfig.for_model(**written).to_dict()
    except (ValueError, TypeError, KeyError, AttributeError):  # unknown, or not in a way that it reads
        return config
