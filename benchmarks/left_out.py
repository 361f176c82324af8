# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What do variants lose on a kind of text that they were not calibrated on? Each kind is left out in turn.

    flexquant quantize MODEL --output text --recipe rtn ... --samples 48 --length 256
    python -m benchmarks.left_out MODEL --text text/calibration.jsonl --recipe FILE --output FILE

For every kind of the corpus each variant of the recipe is made of the same text without that kind, and
measured on all documents of it. Of a recipe with two variants it also measures answers: with prompts in the
first, and in the second alone. Runs in .venv/quantize; what the output has is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.result import origin, write_result
from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.measured_loss import Loss
from flexquant.documents.texts import draw_rows, read_corpus
from flexquant.quantization.loss import (
    Reference,
    measure_answers,
    measure_loss,
    measuring_rows,
    read_prompts,
    reference_of,
)
from flexquant.quantization.oneshot import load_whole, quantize_in_memory
from flexquant.quantization.progress import quiet_libraries
from flexquant.quantization.recipe import Recipe, load_recipe
from flexquant.quantization.resolve import resolve_variant
from flexquant.quantization.source_model import SourceModel, empty_model, read_source


def rows_without(kind: str, text: Path, recipe: Recipe, tokenizer: Any) -> list[list[int]]:
    """Return calibration rows of ``text``, as quantising wrote it, without the documents of a kind."""
    records = [json.loads(line) for line in text.read_text(encoding="utf-8").splitlines()]
    documents = [r.get("messages") or r["text"] for r in records if r.get("kind") != kind]
    return draw_rows(documents, tokenizer, **recipe.calibration.model_dump(exclude={"data"}))


def measure(
    source: SourceModel, recipe: Recipe, rows: list[list[int]], reference: Reference, tokenizer: Any
) -> dict[str, Any]:
    """Return what each variant of the recipe loses, and what it took to make it."""
    found: dict[str, Any] = {}
    prompts = None
    for name, given in recipe.variants.items():
        variant = resolve_variant(given, empty_model(source.config), source.config.model_type)
        started = time.monotonic()
        with quiet_libraries(print):
            model, *_ = quantize_in_memory(variant, source, tokenizer, rows, recipe.calibration.seed, None)
        found[name] = {"seconds": round(time.monotonic() - started), **only(measure_loss(model, reference))}
        own = read_prompts(model, reference)
        if own is not None:
            if prompts is not None:
                first = next(iter(recipe.variants))
                found[f"{first} → {name}"] = only(measure_answers(model, prompts, reference))
                found[f"{name}, answers"] = only(measure_answers(model, own, reference))
            prompts = own
        del model
        gc.collect()
    return found


def only(losses: dict[str, Loss]) -> dict[str, Any]:
    (loss,) = losses.values()
    return loss.model_dump()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the 16-bit model")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="a calibration.jsonl")
    parser.add_argument("--recipe", required=True, metavar="NAME|FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    source, tokenizer, recipe = read_source(args.model), load_tokenizer(args.model), load_recipe(args.recipe)
    parts = [read_corpus(held_out=held_out) for held_out in (False, True)]
    rows = measuring_rows({kind: parts[0][kind] + parts[1][kind] for kind in parts[0]}, (), tokenizer)
    reference = reference_of(load_whole(source), rows)
    document = {**origin("benchmarks.left_out"), "losses": {}}
    if args.output.exists():
        document["losses"] = json.loads(args.output.read_text(encoding="utf-8"))["losses"]
    for kind in reference.answers:
        if kind not in document["losses"]:
            of_kind = Reference({kind: rows[kind]}, {kind: reference.answers[kind]})
            drawn = rows_without(kind, args.text, recipe, tokenizer)
            document["losses"][kind] = measure(source, recipe, drawn, of_kind, tokenizer)
            write_result(args.output, document)
        print(kind, json.dumps(document["losses"][kind]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
