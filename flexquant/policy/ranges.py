# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Ranges in a policy: of the sizes of passes, and of decoder layers with the variant that runs them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexquant.checkpoint.merged_config import check_variant_name
from flexquant.documents.yaml_document import Document, KeyPath, show
from flexquant.errors import FlexQuantError

LAYERS = re.compile(r"(0|-?[1-9]\d*)(?:-(0|-?[1-9]\d*))?")


@dataclass(frozen=True)
class Bounds:
    """A range of whole numbers, both ends included; no ``max``: no upper end."""

    min: int = 1
    max: int | None = None

    def __contains__(self, number: int) -> bool:
        return self.min <= number and (self.max is None or number <= self.max)

    def starts(self, unit: int = 1) -> set[int]:
        """Where the range begins, and where what is above it does, both in numbers of ``unit`` to a whole."""
        first = (self.min - 1) * unit + 1
        return {first} if self.max is None else {first, self.max * unit + 1}


def are_covered(ranges: Sequence[Bounds], others: Sequence[Sequence[Bounds]]) -> bool:
    """Whether all points of a box, given by its range in each dimension, lie within some of other boxes.

    If one does not, then one at the lower ends of the ranges left over does not.
    """
    if not ranges or not others:
        return bool(others)
    first, *rest = ranges
    starts = {first.min} | {start for other in others for start in other[0].starts() if start in first}
    return all(are_covered(rest, [other[1:] for other in others if start in other[0]]) for start in starts)


@dataclass(frozen=True)
class LayerRange:
    """The variant of layers ``first`` to ``last``, both included; negative ones count from the end."""

    first: int
    last: int
    variant: str
    text: str
    """The range as written in the policy."""
    place: str = field(compare=False)
    """File, line and key, for messages."""


def read_bounds(value: Any, path: KeyPath, document: Document) -> Bounds:
    """Return the range of sizes at ``path``, e.g. ``{max: 32}``; raise FlexQuantError for anything else."""
    document.check_keys(value, path, (), ("min", "max"))
    if not value:
        document.fail(path, "is empty; give min, max or both")
    for key, number in value.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            document.fail((*path, key), f"is {show(number)}; give a whole number of at least 1")
    bounds = Bounds(**value)
    if bounds.max is not None and bounds.min > bounds.max:
        document.fail(path, f"has min {bounds.min} above max {bounds.max}; correct one of the two")
    return bounds


def read_layers(value: Any, path: KeyPath, document: Document) -> tuple[LayerRange, ...]:
    """Return the mapping at ``path``, e.g. ``{"0-3": w8a8}``; raise FlexQuantError for anything else.

    Whether the model has these layers is not known here.
    """
    if not isinstance(value, dict) or not value:
        document.fail(path, f'is {show(value)}; give a mapping from layers to variants, e.g. "0-3": w8a8')
    ranges = []
    for text, variant in value.items():
        key_path = (*path, text)
        match = LAYERS.fullmatch(text)
        if match is None:
            document.fail(
                key_path, 'does not name layers; write a number or a range such as "5", "0-3" or "-4--1"'
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if first > last and (first < 0) == (last < 0):
            document.fail(key_path, f'runs backwards; write "{last}-{first}"')
        ranges.append(
            LayerRange(first, last, read_variant(variant, key_path, document), text, document.place(key_path))
        )
    return tuple(ranges)


def read_variant(value: Any, path: KeyPath, document: Document) -> str:
    """Return the name of a variant at ``path``; raise FlexQuantError for what cannot be one."""
    if not isinstance(value, str):
        document.fail(path, f"is {show(value)}; give the name of a variant, e.g. w8a8")
    try:
        check_variant_name(value)
    except FlexQuantError as e:
        document.fail(path, f"is wrong: {e}")
    return value
