# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One architecture from a random model to its answers: made, quantised, merged, served, compared.

    python -m tests.architectures.chain ARCHITECTURE --work FOLDER --output FILE

A process of its own, since a model class that fails may leave vLLM in any state.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.architectures.models import model_type, random_model, small_config, split
from tests.checkpoints import write_checkpoint
from tests.integration.conftest import generate

PROMPTS = ["hello world, this is a prompt of more than one chunk " * 3, "abc", "xyz 1", "xyz 2"]
SAMPLING = {"max_tokens": 8, "ignore_eos": True}
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512}
VARIANTS = ("w8a8", "w4a16")

SERVED, REFUSED, STOCK_FAILS, NOT_MADE, FAILS = "served", "refused", "stock vLLM fails", "not made", "fails"


@dataclass(frozen=True)
class Outcome:
    """What came of one architecture."""

    architecture: str
    model_type: str | None
    outcome: str
    reason: str = ""


class Ended(Exception):
    """A step that the chain does not get beyond: the outcome, and the reason."""


def step(outcome: str, what: Callable[[], Any]) -> Any:
    """Do one step; raise Ended if it fails, as a refusal where FlexQuant says so itself."""
    try:
        return what()
    except Exception as e:
        refused = next((cause for cause in causes(e) if isinstance(cause, FlexQuantError)), None)
        if refused is not None:
            raise Ended(REFUSED, first_line(refused)) from e
        raise Ended(outcome, f"{type(e).__name__}: {first_line(e)}") from e


def causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else ""


def make_variants(kind: str, work: Path) -> None:
    model = random_model(small_config(kind))
    state, quantised, left_out = split(model)
    model.config.architectures = [type(model).__name__]
    for scheme in VARIANTS:
        write_checkpoint(work / scheme, model.config, state, scheme, quantised, left_out)


def run(kind: str, work: Path) -> None:
    """Go through the chain of a model type; raise Ended where it ends early."""
    step(NOT_MADE, lambda: make_variants(kind, work))
    stock = {
        variant: step(
            STOCK_FAILS, lambda v=variant: generate(work / v, None, PROMPTS, sampling=SAMPLING, **OPTIONS)
        )[0]
        for variant in VARIANTS
    }
    step(FAILS, lambda: merge_checkpoints({v: work / v for v in VARIANTS}, work / "merged"))
    served = step(
        FAILS, lambda: generate(work / "merged", list(VARIANTS), PROMPTS, sampling=SAMPLING, **OPTIONS)
    )
    for variant, found in zip(VARIANTS, served, strict=True):
        if found.answers != stock[variant].answers:
            raise Ended(FAILS, f"the answers under {variant} are not those of stock vLLM")
    if stock["w8a8"].answers == stock["w4a16"].answers:
        raise Ended(NOT_MADE, "both variants give the same answers")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architecture")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write the outcome to")
    args = parser.parse_args()
    kind, outcome, reason = model_type(args.architecture), SERVED, ""
    try:
        if kind is None:
            raise Ended(NOT_MADE, "transformers has no class of this name")
        run(kind, args.work)
    except Ended as e:
        outcome, reason = e.args
    found = Outcome(args.architecture, kind, outcome, reason)
    args.output.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
