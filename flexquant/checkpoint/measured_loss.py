# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a variant lost when it was quantised, as its recipe records it: read, shown, held against a bound."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ValidationError

from flexquant.documents.results import table_lines
from flexquant.documents.yaml_document import from_yaml
from flexquant.errors import FlexQuantError

MAX_LOSS = 0.10
"""Growth of the perplexity, or KL divergence in nats, beyond which a variant lost too much of a text."""
PROMPT_TOKENS = 64
"""Tokens of a text that are its prompt, where prompts and answers have variants of their own."""
KEY = "measured"
"""The key of a recipe under which a variant's losses are, by kind of text."""
HELP = (
    "calibrate on text like your users' (--calibration FILE), or add to the recipe what it lacks: for INT4 "
    "zero points (W4A16_ASYM), groups of 32, scale_distillation; for W8A8 what 'default' has"
)

Finite = Annotated[
    float | None, AfterValidator(lambda value: value if value is not None and math.isfinite(value) else None)
]
"""A number, or None in place of one that is not finite."""


class Loss(BaseModel):
    """What a variant lost on one kind of text; errors are over documents. None: not finite, or no error."""

    documents: int
    kl: Finite
    """Mean KL divergence to the 16-bit model, in nats a token."""
    kl_error: Finite
    perplexity: Finite
    """Share by which the perplexity is above the 16-bit model's."""
    perplexity_error: Finite
    same_top: Finite
    """Share of the tokens after which both find the same token likeliest."""

    def exceeds(self, bound: float) -> bool:
        return any(value is None or value > bound for value in (self.perplexity, self.kl))

    def growth(self) -> str:
        """Return e.g. ``+3.1 % ± 0.4``, for the perplexity."""
        if self.perplexity is None:
            return "not finite"
        error = "" if self.perplexity_error is None else f" ± {100 * self.perplexity_error:.1f}"
        return f"{100 * self.perplexity:+.1f} %{error}"


LossByKind = Mapping[str, Loss]
"""Kind of text -> what a variant lost on it."""


def read_losses(recipes: Mapping[str, Path]) -> dict[str, LossByKind]:
    """Return variant -> its losses, of the variants whose recipe records any; ``recipes`` are their files."""
    found: dict[str, LossByKind] = {}
    for variant, path in recipes.items():
        try:
            measured = from_yaml(path.read_bytes(), str(path), "recipe", []).data.get(KEY) or {}
            losses = {kind: Loss.model_validate(loss) for kind, loss in measured.items()}
        except (FlexQuantError, ValidationError, AttributeError, OSError):
            continue
        if losses:
            found[variant] = losses
    return found


def loss_table(losses: Mapping[str, LossByKind]) -> list[list[str]]:
    """Return a table with a row for each kind of text, and three columns for each variant."""
    columns = [f"{variant}: {what}" for variant in losses for what in ("perplexity", "KL", "same top token")]
    rows = [["text", *columns]]
    for kind in dict.fromkeys(kind for of_variant in losses.values() for kind in of_variant):
        cells = []
        for of_variant in losses.values():
            loss = of_variant.get(kind)
            same = "" if loss is None or loss.same_top is None else f"{100 * loss.same_top:.1f} %"
            kl = "not finite" if loss is None or loss.kl is None else f"{loss.kl:.3f}"
            cells += [loss.growth(), kl, same] if loss else [""] * 3
        rows.append([kind, *cells])
    return rows


def loss_lines(losses: Mapping[str, LossByKind], bound: float = MAX_LOSS, on: str = "texts") -> list[str]:
    """Return for a terminal the table, and a sentence about what lost more than ``bound``."""
    if not losses:
        return []
    rows = loss_table(losses)
    title = f"lost against the 16-bit model, on {on} that no variant was calibrated on:"
    said = too_much(losses, bound)
    return [title, *table_lines(rows, numbers=range(1, len(rows[0]))), *([said] if said else [])]


def too_much(losses: Mapping[str, LossByKind], bound: float = MAX_LOSS) -> str:
    """Return a sentence about the variants, and texts, whose loss is above ``bound``; empty if none is."""
    beyond = {name: [kind for kind, loss in of.items() if loss.exceeds(bound)] for name, of in losses.items()}
    found = "; ".join(f"{variant} on {', '.join(kinds)}" for variant, kinds in beyond.items() if kinds)
    limits = f"{100 * bound:g} % of perplexity or a KL divergence of {bound:g}"
    return f"more than {limits} is lost by {found}. What helps: {HELP}" if found else ""


def dump_losses(losses: Mapping[str, LossByKind]) -> dict[str, Any]:
    return {name: {kind: x.model_dump() for kind, x in kinds.items()} for name, kinds in losses.items()}
