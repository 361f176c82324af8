# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantises with few samples, and holds recipes as data."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import yaml

from flexquant.quantization.progress import Stage
from flexquant.quantization.quantizing import quantize_variants
from flexquant.quantization.recipe import SCHEMA, Recipe, load_recipe, parse_recipe
from flexquant.quantization.report import QuantizedVariant

FEW: dict[str, Any] = {"samples": 4, "length": 64}

RTN = {"QuantizationModifier": {"ignore": ["lm_head"], "scheme": "W8A8"}}
"""A variant that takes seconds to make."""
W4A16 = {"GPTQModifier": {"ignore": ["lm_head"], "scheme": "W4A16", "group_size": [128, 64, 32]}}


def recorder(titles: list[str]) -> Stage:
    """Return a function to pass as ``stage``, which appends the titles of all stages."""

    def stage(title: str, **unit: str) -> AbstractContextManager[None]:
        titles.append(title)
        return nullcontext()

    return stage


def recipe(**variants: Any) -> Recipe:
    document = {"schema": SCHEMA, "variants": variants}
    return parse_recipe(yaml.safe_dump(document, sort_keys=False).encode(), "test.yaml", "test")


def quantize(
    model: Path, output: Path, by: Recipe | str = "default", *variants: str, **options: Any
) -> list[QuantizedVariant]:
    by = load_recipe(by) if isinstance(by, str) else by
    return quantize_variants(model, output, by, **{"variants": variants or None, **FEW, **options})
