# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant doctor`: check how ``vllm serve`` would run a merged checkpoint, without loading weights."""

from dataclasses import dataclass, field
from typing import Literal

from flexquant.checkpoint.model_config import JsonObject

Level = Literal["ok", "note", "problem"]
"""``note``: it serves, but slower than it could or not as expected; ``problem``: it does not serve."""


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str
    details: JsonObject = field(default_factory=dict)
    """The figures of the text and more, for programs."""

    def line(self) -> str:
        mark = {"ok": " ", "note": "!", "problem": "X"}[self.level]
        return f"{mark} {self.subject:<10} {self.text}"
