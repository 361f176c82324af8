# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints whose config ties the lm_head to the embedding, with heads that their publishers left in."""

import json
from pathlib import Path

import torch

from tests.checkpoints import StateDict, make_checkpoint

HEAD, EMBEDDING, NORM = "lm_head", "model.embed_tokens", "model.norm.weight"


def make_tied(folder: Path, scheme: str, head: str | None, architecture: str = "llama") -> Path:
    """Write a variant of a tied model.

    ``head``: None, for none in the file; ``copy``, the embedding once more; ``short``, with a row less; or
    another word, which stands for a share of the final norm that is moved into a head of its own.
    """

    def add(state: StateDict) -> StateDict:
        embedding = state[f"{EMBEDDING}.weight"]
        if head is None:
            return state
        if head in ("copy", "short"):
            return state | {f"{HEAD}.weight": embedding[: -1 if head == "short" else None].clone()}
        share = 0.5 + torch.rand(embedding.shape[1], generator=torch.Generator().manual_seed(len(head)))
        folded = {f"{HEAD}.weight": embedding.float() * share, NORM: state[NORM].float() / share}
        return state | {name: tensor.bfloat16() for name, tensor in folded.items()}

    return make_checkpoint(folder, architecture, scheme, transform=add, tie_word_embeddings=True)


def without_key(folder: Path, key: str) -> Path:
    """Take a key out of a checkpoint's config."""
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_tied_pair(
    folder: Path, *heads: str | None, architecture: str = "llama", key: bool = True
) -> dict[str, Path]:
    """Write w8a8 and w4a16 with these heads; without ``key`` their configs do not say that they are tied."""
    sources = {}
    for name, head in zip(("w8a8", "w4a16"), heads, strict=True):
        sources[name] = make_tied(folder / name, name, head, architecture)
        if not key:
            without_key(sources[name], "tie_word_embeddings")
    return sources
