# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Draw the prompts from which a model writes its own calibration text: requests and first words.

openings.yaml holds them. English, the first language there, has requests with a place for a topic, and code;
the other languages are used if the model knows them. ``sentence`` has the same meaning in every language, so
a model that knows two languages finds it about as likely in both.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from random import Random
from typing import Any

import yaml


@dataclass(frozen=True)
class Language:
    """A language that a model may know."""

    sentence: str
    requests: tuple[str, ...]
    """Questions of users; ``{}`` stands for one of TOPICS."""
    openings: tuple[str, ...]
    """First words of texts."""


_DATA: dict[str, Any] = yaml.safe_load(
    importlib.resources.files("flexquant.quantization").joinpath("openings.yaml").read_text("utf-8")
)
TOPICS: tuple[str, ...] = tuple(_DATA["topics"])
ENGLISH, *OTHERS = (
    Language(entry["sentence"], tuple(entry["requests"]), tuple(entry["openings"]))
    for entry in _DATA["languages"]
)


def draw_request(languages: tuple[Language, ...], draw: Random) -> str:
    """Return a request in one of the languages."""
    return draw.choice(draw.choice(languages).requests).replace("{}", draw.choice(TOPICS))


def draw_opening(languages: tuple[Language, ...], draw: Random) -> str:
    """Return the first words of a text in one of the languages, or of code."""
    return draw.choice(draw.choice(languages).openings)
