# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Stands in for torchvision, of which vLLM's classes import names that a text model does not call."""

from __future__ import annotations

import sys
from types import ModuleType

from transformers.utils import is_torchvision_available

MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class Names(ModuleType):
    """A module that has every name, and nothing behind it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def provide_torchvision() -> None:
    """Let this process import torchvision's names; for transformers, it stays missing."""
    if is_torchvision_available():
        return
    for name in MODULES:
        parent, _, last = name.rpartition(".")
        sys.modules[name] = Names(name)
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
