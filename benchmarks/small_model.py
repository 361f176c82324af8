# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Train a small model of another architecture (Qwen3's), to see whether what helps one model helps another.

    python -m benchmarks.small_model .work/texts/handbook.txt --output .work/qwen3-8m

The text is what is given, and the sources of Python's manual, from the Debian package python3.11-doc, which
apt fetches. The tokenizer is trained on it too. Runs in the quantising environment, for an hour on one core;
what it writes differs in the last bits from machine to machine.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

from flexquant.documents.texts import read_documents

PACKAGE = "python3.11-doc"
SOURCES = "usr/share/doc/python3.11/html/_sources/**/*.rst.txt"
BOS, VOCABULARY = "<bos>", 4096
LENGTH, ROWS = 256, 16
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def manual() -> Iterator[str]:
    """Yield the chapters of Python's manual."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", "--quiet", PACKAGE], cwd=scratch, check=True)
        (package,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg", "-x", str(package), scratch], check=True)
        for file in sorted(Path(scratch).glob(SOURCES)):
            yield file.read_text(encoding="utf-8")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, chat_template=CHAT_TEMPLATE
    )


def make_model(num_layers: int = 8) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            max_position_embeddings=2048,
        )
    )


def train(model: Qwen3ForCausalLM, ids: torch.Tensor, steps: int, warm_up: int = 100) -> None:
    """Train on rows that are drawn from ``ids`` [tokens], each with BOS in front."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    bos = torch.zeros(ROWS, 1, dtype=torch.long)

    def draw() -> torch.Tensor:
        return torch.cat([bos, draw_rows_of(ids, ROWS, LENGTH - 1)], dim=1)

    take_steps(model, optimizer, draw, steps, warm_up)


def draw_rows_of(ids: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return random stretches of ``ids`` [tokens]: [rows, length]."""
    starts = torch.randint(len(ids) - length, (rows,))
    return torch.stack([ids[start : start + length] for start in starts])


def take_steps(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    draw: Callable[[], torch.Tensor],
    steps: int,
    warm_up: int,
    every: int = 100,
) -> None:
    """Train on rows that ``draw`` returns, at a rate that falls as a cosine; print the loss now and then."""
    schedule = get_cosine_schedule_with_warmup(optimizer, warm_up, steps)
    for step in range(steps):
        rows = draw()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % every == 0 or step == steps - 1:
            print(f"step {step} of {steps}: {loss.item():.3f} nats a token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, nargs="*", help="more text: files or folders")
    parser.add_argument("--steps", type=int, default=1200, help=f"of {ROWS} x {LENGTH} tokens (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    texts = [*manual(), *(str(document) for text in args.texts for document in read_documents(text))]
    tokenizer = train_tokenizer(texts)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([token for text in encoded for token in (*text, 0)])
    model = make_model()
    print(f"{model.num_parameters():,} parameters, {len(ids):,} tokens of text", flush=True)
    train(model, ids, args.steps)
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
