# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Turn a trained Llama into a trained model of another architecture, on which no recipe was tuned.

    python -m benchmarks.healed_model .work/SmolLM2-135M-Instruct --texts .work/texts --output .work/healed

The result has two of three layers of the original, and no chat template. As qwen3 it has norms of Q and K,
and sliding windows in three of four layers; as phi3 it has fused linears, and drops other layers. What that
broke is healed by training on text: the files of --texts and Python's manual. The weights have the outliers
of a model that was trained for long, which a small model that is trained from nothing lacks, so rounding to
four bits hurts it. Runs in the quantising environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.small_model import draw_rows_of, manual, take_steps
from flexquant.documents.texts import read_documents

LENGTH, ROWS = 256, 4
WINDOW = 64
SAMPLE = "The lighthouse keeper wrote down the wind, the hour and the ships that had passed since noon."


def kept_layers(count: int, dropped: int) -> list[int]:
    """Return the layers that stay: all but each third one, which begin with number ``dropped``."""
    return [i for i in range(count) if i % 3 != dropped or i in (0, count - 1)]


@torch.inference_mode()
def heads_size(model: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return for each projection to Q and K, by name, the root mean square of its outputs on ``ids``."""
    found: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, out, name=name: found.update({name: out.float().square().mean().sqrt()})
        )
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj"))
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def convert_to_qwen3(model: LlamaForCausalLM, sizes: dict[str, torch.Tensor]) -> Qwen3ForCausalLM:
    """Return a Qwen3 with the kept layers' weights; the norms of Q and K have the ``sizes`` as weights."""
    layers = kept_layers(model.config.num_hidden_layers, dropped=1)
    settings = settings_of(model, len(layers))
    windows = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(len(layers))]
    new = Qwen3ForCausalLM(
        Qwen3Config(**settings, use_sliding_window=True, sliding_window=WINDOW, layer_types=windows)
    )
    state = kept_weights(model, layers)
    for number, layer in enumerate(layers):
        for norm in ("q", "k"):
            size = sizes[f"model.layers.{layer}.self_attn.{norm}_proj"]
            weight = size.expand(settings["head_dim"]).clone()
            state[f"model.layers.{number}.self_attn.{norm}_norm.weight"] = weight
    new.load_state_dict(state)
    return new


def convert_to_phi3(model: LlamaForCausalLM) -> Phi3ForCausalLM:
    """Return a Phi-3 with the kept layers' weights."""
    layers = kept_layers(model.config.num_hidden_layers, dropped=2)
    new = Phi3ForCausalLM(Phi3Config(**settings_of(model, len(layers)), pad_token_id=None))
    state = kept_weights(model, layers)
    for number in range(len(layers)):
        for whole, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
            room = f"model.layers.{number}.{whole.partition('.')[0]}"
            weights = [state.pop(f"{room}.{part}_proj.weight") for part in parts]
            state[f"model.layers.{number}.{whole}_proj.weight"] = torch.cat(weights)
    new.load_state_dict(state)
    return new


def settings_of(model: LlamaForCausalLM, num_layers: int) -> dict[str, Any]:
    """Return what the new model's config has in common with the old one's."""
    old = model.config
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    )
    head = old.hidden_size // old.num_attention_heads
    return {
        **{name: getattr(old, name) for name in same},
        "num_hidden_layers": num_layers,
        "head_dim": head,
        "tie_word_embeddings": True,
    }


def kept_weights(model: LlamaForCausalLM, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the weights of the embedding, the head, the last norm, and these layers, numbered anew."""
    weights = model.state_dict()
    state = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    for number, layer in enumerate(layers):
        of_layer = f"model.layers.{layer}."
        for name, tensor in weights.items():
            if name.startswith(of_layer):
                state[f"model.layers.{number}." + name.removeprefix(of_layer)] = tensor
    return state


def heal(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> None:
    """Train all weights on rows that are drawn from ``ids`` [tokens]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    take_steps(model, optimizer, lambda: draw_rows_of(ids, ROWS, LENGTH), steps, warm_up=20, every=20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a Llama, its head tied to the embedding")
    parser.add_argument("--texts", type=Path, required=True, help="file or folder of text")
    parser.add_argument("--architecture", choices=("qwen3", "phi3"), default="qwen3")
    parser.add_argument("--steps", type=int, default=500, help=f"of {ROWS} x {LENGTH} tokens (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    llama = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model: PreTrainedModel = (
        convert_to_phi3(llama)
        if args.architecture == "phi3"
        else convert_to_qwen3(llama, heads_size(llama, tokenizer(SAMPLE, return_tensors="pt")["input_ids"]))
    )
    del llama
    texts = [*manual(), *(str(document) for document in read_documents(args.texts))]
    Random(0).shuffle(texts)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([token for text in encoded for token in (*text, tokenizer.eos_token_id)])
    print(f"{model.num_parameters():,} parameters, {len(ids):,} tokens of text", flush=True)
    heal(model, ids, args.steps)
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
