# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How near a weight-only variant decodes to its 16-bit model, on prose and on the model's own answers.

    python benchmarks/demo_calibration.py MODEL TEXT "how it was made=FOLDER" ... --output FILE.jsonl

Each FOLDER is a variant of MODEL with 16-bit activations. The 16-bit model prefills, as ``phase`` prefills
with the nearly lossless W8A8, and the variant decodes on its KV cache: rows of TEXT, and the 16-bit model's
greedy answers to questions. Two lines are appended to FILE for each FOLDER: one for the variant alone, one
with the outer layers in 16 bit, as ``phase-batch-layer`` keeps them in W8A8. Runs in the quantising
environment, in float32, since only weights are compared.
"""

from __future__ import annotations

import argparse
import json
import math
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from flexquant.documents.texts import draw_rows, read_documents
from flexquant.measuring.machine import describe_command, describe_machine

QUESTIONS = Path(__file__).parents[1] / "flexquant/evaluation/questions.txt"
PROMPT, CONTINUATION, ROWS, ANSWER = 64, 128, 16, 48
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")

OUTER = [0, 1, 2, 3, 29]
"""The layers that ``phase-batch-layer`` keeps in W8A8, and that this benchmark keeps in 16 bit."""

Sequence = tuple[torch.Tensor, torch.Tensor]
"""The token ids of a prompt and of what follows, each [1, tokens]."""


def generate(model, tokenizer, prompts: list[str]) -> list[torch.Tensor]:
    """Return the token ids [1, tokens] of a greedy answer to each prompt, up to its end."""
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=ANSWER)
    answers = []
    for row in output[:, inputs["input_ids"].shape[1] :]:
        ends = (row == tokenizer.eos_token_id).nonzero()
        answers.append(row[None, : int(ends[0]) + 1 if len(ends) else None])
    return answers


def shortened(argument: str) -> str:
    """Return an argument NAME=FOLDER with only the last part of an absolute folder; keep other arguments."""
    name, equals, folder = argument.rpartition("=")
    return f"{name}={Path(folder).name}" if equals and Path(folder).is_absolute() else argument


@torch.inference_mode()
def score(model, reference, sequences: list[Sequence]) -> dict[str, float]:
    """Return both models' perplexity, their KL divergence in nats, and the share of equal top tokens."""
    losses, reference_losses, divergences, agreements = [], [], [], []
    for prompt, following in sequences:
        cache = reference(prompt[:, :-1], use_cache=True).past_key_values
        fed = torch.cat([prompt[:, -1:], following[:, :-1]], dim=1)
        expected = reference(fed, past_key_values=deepcopy(cache)).logits.log_softmax(-1)
        found = model(fed, past_key_values=cache).logits.log_softmax(-1)
        losses.append(-found.gather(2, following[..., None]).flatten())
        reference_losses.append(-expected.gather(2, following[..., None]).flatten())
        divergences.append((expected.exp() * (expected - found)).sum(-1).flatten())
        agreements.append((expected.argmax(-1) == found.argmax(-1)).float().flatten())
    means = [float(torch.cat(v).mean()) for v in (losses, reference_losses, divergences, agreements)]
    keys = ("perplexity", "perplexity_16_bit", "kl", "same_top_token")
    return dict(zip(keys, [math.exp(means[0]), math.exp(means[1]), *means[2:]], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the 16-bit model")
    parser.add_argument("text", help="text that no variant was calibrated on")
    parser.add_argument("variants", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument(
        "--questions", type=Path, default=QUESTIONS, help="one a line (default: those of eval)"
    )
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file to append to")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    rows = draw_rows(read_documents(args.text), tokenizer, samples=ROWS, length=PROMPT + CONTINUATION, seed=0)
    prose = [torch.tensor([row]).split([PROMPT, CONTINUATION], dim=1) for row in rows]
    questions = args.questions.read_text().splitlines()
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    expected = generate(reference, tokenizer, prompts)
    encoded = [tokenizer(p, add_special_tokens=False, return_tensors="pt")["input_ids"] for p in prompts]
    own = list(zip(encoded, expected, strict=True))
    for name, folder in (pair.rsplit("=", 1) for pair in args.variants):
        config = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
        found = generate(model, tokenizer, prompts)
        for question, a, b in zip(questions, expected, found, strict=True):
            print(f"Q: {question}\n{tokenizer.decode(a[0])!r}\n{tokenizer.decode(b[0])!r}", flush=True)
        for outer in (False, True):
            if outer:
                for layer in OUTER:
                    model.model.layers[layer] = reference.model.layers[layer]
            measured = {
                "variant": name,
                "layers_in_16_bit": OUTER if outer else [],
                "prose": score(model, reference, prose),
                "own_answers": score(model, reference, own),
                "same_greedy_answers": None if outer else sum(map(torch.equal, found, expected)),
                "questions": len(questions),
                "calibration": json.loads((Path(folder) / "quantization_report.json").read_text())[
                    "calibration"
                ],
                "weight_bytes": sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")),
                "command": [shortened(argument) for argument in describe_command()],
                "machine": describe_machine(),
                "versions": {package: version(package) for package in PACKAGES},
            }
            with args.output.open("a") as lines:
                lines.write(json.dumps(measured) + "\n")
            print(name, measured["layers_in_16_bit"], measured["prose"], measured["own_answers"])


if __name__ == "__main__":
    main()
