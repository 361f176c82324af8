# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read what the ``quantization_config`` of an AWQ, GPTQ or AutoRound checkpoint says of its linears."""

from __future__ import annotations

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

AWQ, GPTQ = "awq", "gptq"
NUMBERS = {"bits": ("w_bit", 4), "group_size": ("q_group_size", 128)}
"""Setting -> the name that AutoAWQ also gives it, and the value of one that is left out."""
TEXTS = ("4", "8")
"""Numbers of bits that some releases wrote as text."""
SWITCHES = {AWQ: {"zero_point": True}, GPTQ: {"sym": True, "desc_act": False}}
"""Method -> setting -> the value of one that is left out."""


def complete_settings(section: JsonObject, place: str, method: str = GPTQ) -> JsonObject:
    """Return a section with each setting of a linear by ``method``, under one name and of one type.

    Raises FlexQuantError, which begins with ``place``, for a value of another type.
    """
    found = {key: value for key, value in section.items() if value is not None}
    for key, (alias, default) in NUMBERS.items():
        number = found.setdefault(key, found.get(alias, default))
        found.pop(alias, None)
        if number in TEXTS:
            found[key] = number = int(number)
        if type(number) is not int:
            raise FlexQuantError(
                f"{place} has {key} {number!r}, expected a whole number, in its quantization_config; correct "
                "it, or get the checkpoint again"
            )
    for key, is_on in SWITCHES[method].items():
        if not isinstance(found.setdefault(key, is_on), bool):
            raise FlexQuantError(
                f"{place} has {key} {found[key]!r}, expected true or false, in its quantization_config; "
                "correct it, or get the checkpoint again"
            )
    return found
