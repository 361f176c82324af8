# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How near variants calibrated on different texts are to their 16-bit model, on texts that none has seen.

    flexquant quantize MODEL --output v/self --samples 32 --length 256
    sed 's/data: self/data: null/' flexquant/quantization/recipes/default.yaml > docs.yaml
    flexquant quantize MODEL --output v/docs --samples 32 --length 256 --recipe docs.yaml
    python -m benchmarks.calibration_texts --own v/self/calibration.jsonl --output texts
    flexquant quantize MODEL --output v/handbook --samples 32 --length 256 --calibration texts/handbook.txt
    flexquant quantize MODEL --output v/mix --samples 32 --length 256 --calibration texts/mix.jsonl
    python -m benchmarks.calibration MODEL texts docs=v/docs/w4a16 handbook=v/handbook/w4a16 \\
        self=v/self/w4a16 mix=v/mix/w4a16 "docs, INT8=v/docs/w8a8" "self, INT8=v/self/w8a8" --output FILE.json

For groups of 32, take examples/small_model.yaml without its scale_distillation, and other folders. The ways
to INT4 of benchmarks/recipes/int4.yaml are compared likewise; benchmarks/rotated.py makes the rotated model,
and benchmarks/small_model.py the second model.

Rows of `prose.txt`, `code.txt` and `chat.jsonl` of that folder go through the 16-bit model and through every
variant, in float32, with weights (and, in W8A8, activations) rounded as the scheme says. The result holds
every row. The printed table compares each variant, row by row, with the first one of the same scheme and
group size. The benchmark runs in the quantising environment, and holds all models in memory at once.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from benchmarks.calibration_table import calibration_table
from flexquant.documents.texts import draw_rows, read_documents
from flexquant.measuring.machine import describe_command, describe_machine

TEXTS = {"prose": "prose.txt", "code": "code.txt", "chat": "chat.jsonl"}
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")


def shortened(argument: str) -> str:
    """Return an argument, or what follows its "=", with only the last two parts of an absolute path."""
    name, equals, path = argument.rpartition("=")
    return name + equals + "/".join(Path(path).parts[-2:]) if Path(path).is_absolute() else argument


@torch.inference_mode()
def log_probabilities(model: Any, row: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities after each token of a row [1, tokens]: [tokens - 1, vocabulary]."""
    logits: torch.Tensor = model(row).logits[0, :-1].float()
    return logits.log_softmax(-1)


def scheme_of(folder: Path) -> str:
    """Return e.g. ``w4a16`` for a checkpoint that llm-compressor wrote."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = next(iter(config["config_groups"].values()))
    activations = (group["input_activations"] or {"num_bits": 16})["num_bits"]
    return f"w{group['weights']['num_bits']}a{activations}"


def load(folder: Path, scheme: str) -> Any:
    # Weight-only schemes are measured with dequantised weights; the others also quantise activations.
    config = CompressedTensorsConfig(dequantize=scheme == "w4a16")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the 16-bit model")
    parser.add_argument("texts", type=Path, help="folder of calibration_texts.py")
    parser.add_argument("variants", nargs="+", metavar="NAME=FOLDER", help="what flexquant quantize wrote")
    parser.add_argument("--rows", type=int, default=24, help="rows of each text (%(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help=".json file to write")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    folders = {name: Path(folder) for name, folder in (pair.rsplit("=", 1) for pair in args.variants)}
    schemes = {name: scheme_of(folder) for name, folder in folders.items()}
    models = {name: load(folder, schemes[name]) for name, folder in folders.items()}
    nats: dict[str, list[float]] = {kind: [] for kind in TEXTS}
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        name: {kind: {"nats": [], "kl": [], "same_top_token": []} for kind in TEXTS} for name in models
    }
    for kind, file in TEXTS.items():
        documents = read_documents(args.texts / file)
        for ids in draw_rows(documents, tokenizer, samples=args.rows, length=args.length, seed=0, name=file):
            row = torch.tensor([ids])
            expected = log_probabilities(reference, row)
            following = row[0, 1:, None]
            nats[kind].append(-float(expected.gather(1, following).mean()))
            for name, model in models.items():
                seen = log_probabilities(model, row)
                values = found[name][kind]
                values["nats"].append(-float(seen.gather(1, following).mean()))
                values["kl"].append(float((expected.exp() * (expected - seen)).sum(-1).mean()))
                same = (seen.argmax(-1) == expected.argmax(-1)).float()
                values["same_top_token"].append(float(same.mean()))
        print(kind, {name: sum(v[kind]["kl"]) / args.rows for name, v in found.items()}, flush=True)
    reports = {
        name: json.loads((folder / "quantization_report.json").read_text())
        for name, folder in folders.items()
    }
    result = {
        "command": [shortened(argument) for argument in describe_command()],
        "machine": describe_machine(),
        "versions": {package: version(package) for package in PACKAGES},
        "rows": args.rows,
        "length": args.length,
        "reference_nats": nats,
        "variants": [
            {
                "name": name,
                "scheme": schemes[name],
                "group_size": reports[name]["group_size"],
                "calibration": reports[name]["calibration"],
                "bytes": sum(file.stat().st_size for file in folders[name].glob("*.safetensors")),
                "rows": found[name],
            }
            for name in models
        ],
    }
    args.output.write_text(json.dumps(result) + "\n")
    print(calibration_table(result))


if __name__ == "__main__":
    main()
