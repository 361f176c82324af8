# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What quantising takes at the widths of a 7 B model: seconds and memory, for each layer.

    OMP_NUM_THREADS=1 python -m benchmarks.quantizing_cost MODEL benchmarks/recipes/int4.yaml TEXT \\
        imatrix distilled --samples 4 --length 256 --output FILE.json

`flexquant quantize` makes each of these variants of the recipe twice, from random models of one and of two
decoder layers as wide as Llama-2-7B's. The difference is what one layer more takes, and the result says what
32 would take. TEXT is the calibration text; the tokenizer and the random models' vocabulary are MODEL's. The
benchmark runs in the quantising environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.origin import origin

WIDTHS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
NUM_LAYERS = 32


def make_model(folder: Path, tokenizer_folder: Path, num_layers: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = LlamaConfig(
        **WIDTHS, num_hidden_layers=num_layers, vocab_size=len(tokenizer), tie_word_embeddings=True
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(model: Path, recipe: dict[str, Any], options: list[str], scratch: Path) -> dict[str, float]:
    """Return seconds and peak GiB of a process that makes the variants of a recipe."""
    file, output = scratch / "recipe.yaml", scratch / "variants"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    command = [sys.executable, "-m", "flexquant", "quantize", str(model), "--recipe", str(file)]
    began = time.monotonic()
    child = subprocess.Popen([*command, "--output", str(output), "--overwrite", *options])
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} failed, see above")
    return {"seconds": time.monotonic() - began, "peak_gib": usage.ru_maxrss / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder with a tokenizer")
    parser.add_argument("recipe", type=Path, help="file")
    parser.add_argument("text", help="what to calibrate on: text or .jsonl file")
    parser.add_argument("variants", nargs="+", help="names in the recipe")
    parser.add_argument("--samples", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help=".json file to write")
    args = parser.parse_args()
    recipe = yaml.safe_load(args.recipe.read_text())
    options = ["--samples", str(args.samples), "--length", str(args.length), "--calibration", args.text]
    result = {
        **origin("benchmarks.quantizing_cost"),
        "widths": WIDTHS,
        "samples": args.samples,
        "length": args.length,
        "variants": {},
    }
    with tempfile.TemporaryDirectory(dir=args.output.parent) as folder:
        models = [Path(folder, f"layers-{number}") for number in (1, 2)]
        for number, model in enumerate(models, 1):
            make_model(model, args.model, number)
        for name in args.variants:
            alone = {**recipe, "variants": {name: recipe["variants"][name]}}
            one, two = (measure(model, alone, options, Path(folder)) for model in models)
            layer = {key: two[key] - one[key] for key in one}
            whole = {key: one[key] + (NUM_LAYERS - 1) * layer[key] for key in one}
            result["variants"][name] = {"one": one, "two": two, "layer": layer, f"{NUM_LAYERS}_layers": whole}
            args.output.write_text(json.dumps(result, indent=1) + "\n")
            print(name, result["variants"][name], flush=True)


if __name__ == "__main__":
    main()
