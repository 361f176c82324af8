# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How much a variant loses on a kind of text that it was not calibrated on: each kind is left out in turn.

    flexquant quantize MODEL --output v --samples 32 --length 256
    python -m benchmarks.left_out MODEL --own v/calibration.jsonl --recipe benchmarks/recipes/left_out.yaml \\
        --output benchmarks/results/left-out/NAME.json

For each variant of the recipe and each kind of ``flexquant.documents.texts``, the model is quantised on half
of the model's own text (--own), and half real text of all the other kinds; then the loss on all documents of
that kind is measured. With --before, as before there was a corpus: the real text is Python's documentation.
``--share`` changes the half that is the model's own. The result holds a loss for each variant and kind, and
is written after each. Runs in the quantising environment.
"""

from __future__ import annotations

import argparse
import gc
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.texts import Corpus, draw_rows, read_corpus, tokens_needed
from flexquant.measuring.machine import describe_command, describe_machine
from flexquant.quantization.architecture import empty_model
from flexquant.quantization.in_memory import quantize_in_memory
from flexquant.quantization.loss import Reference, measure_loss, measuring_rows, reference_of
from flexquant.quantization.oneshot import load_whole
from flexquant.quantization.quiet import quiet_libraries
from flexquant.quantization.real_text import REFERENCE, real_text, record_tokens
from flexquant.quantization.recipe import Calibration, load_recipe
from flexquant.quantization.resolve import resolve_variant
from flexquant.quantization.sampling import Language, known_languages
from flexquant.quantization.source_model import SourceModel, read_source

PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")


def all_documents() -> Corpus:
    """Return every document of every kind: none of a kind that is left out is calibrated on."""
    calibrated, held_out = read_corpus(held_out=False), read_corpus(held_out=True)
    return {kind: [*calibrated[kind], *held_out[kind]] for kind in calibrated}


def read_own(path: Path) -> list[JsonObject]:
    """Return the records that the model itself wrote."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "temperature" in record]


def rows_without(
    kinds: set[str],
    own: list[JsonObject],
    share: float,
    tokenizer: PreTrainedTokenizerBase,
    languages: tuple[Language, ...],
    settings: Calibration,
) -> list[list[int]]:
    """Return the calibration rows: a ``share`` of the model's own text, and real text of all other kinds."""
    needed = tokens_needed(tokenizer, samples=settings.samples, length=settings.length)
    tokens, records = 0, []
    for record in own:
        if tokens >= share * needed:
            break
        records.append(record)
        tokens += len(record_tokens(record, tokenizer))
    records += real_text(tokenizer, languages, needed - tokens, settings.seed, without=kinds)
    documents = [record.get("messages") or record["text"] for record in records]
    size = {"samples": settings.samples, "length": settings.length}
    return draw_rows(documents, tokenizer, seed=settings.seed, **size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the 16-bit model")
    parser.add_argument("--own", type=Path, required=True, help=".jsonl file that the model wrote")
    parser.add_argument("--recipe", type=Path, required=True, help="its variants are compared")
    parser.add_argument("--variants", help="comma-separated (default: all of the recipe)")
    parser.add_argument("--kinds", help="comma-separated (default: all)")
    parser.add_argument("--share", type=float, default=0.5, help="of the model's own text (%(default)s)")
    parser.add_argument("--before", action="store_true", help="calibrate on no kind of the corpus")
    parser.add_argument("--together", action="store_true", help="leave all chosen kinds out at once")
    parser.add_argument("--output", type=Path, required=True, help="result file; what it has is kept")
    args = parser.parse_args()
    source, tokenizer, recipe = read_source(args.model), load_tokenizer(args.model), load_recipe(args.recipe)
    model = load_whole(source)
    languages = known_languages(model, tokenizer)
    rows = measuring_rows(all_documents(), languages, tokenizer)
    kinds = args.kinds.split(",") if args.kinds else list(rows)
    reference = reference_of(model, {kind: rows[kind] for kind in kinds})
    del model
    result = json.loads(args.output.read_text()) if args.output.exists() else {"losses": {}}
    result |= {
        "command": describe_command(),
        "machine": describe_machine(),
        "versions": {package: version(package) for package in PACKAGES},
        "languages": [language.code for language in languages],
    }
    folds = [kinds] if args.before or args.together else [[kind] for kind in kinds]
    for name in args.variants.split(",") if args.variants else recipe.variants:
        variant = resolve_variant(recipe.variants[name], empty_model(source.config), source.config.model_type)
        for fold in folds:
            without = set(rows) if args.before else set(fold)
            label = f"{name}, share {args.share:g}" + (", before" if args.before else "")
            if all(kind in result["losses"].get(label, {}) for kind in fold):
                continue
            drawn = rows_without(
                without - {REFERENCE},
                read_own(args.own),
                args.share,
                tokenizer,
                languages,
                recipe.calibration,
            )
            losses = run(variant, source, tokenizer, drawn, recipe.calibration.seed, reference, fold)
            result["losses"].setdefault(label, {}).update(losses)
            for kind, loss in losses.items():
                print(f"{label}, without {kind}: {loss}", flush=True)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(
    variant: Any,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    seed: int,
    reference: Reference,
    fold: list[str],
) -> dict[str, JsonObject]:
    """Quantise on ``rows``, and return the loss on each kind of the fold."""
    with quiet_libraries(print):
        made = quantize_in_memory(variant, source, tokenizer, rows, seed)
    chosen = Reference({k: reference.rows[k] for k in fold}, {k: reference.answers[k] for k in fold})
    losses = {kind: loss.model_dump() for kind, loss in measure_loss(made.model, chosen).items()}
    del made
    gc.collect()
    return losses


if __name__ == "__main__":
    main()
