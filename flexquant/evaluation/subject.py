# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The merged checkpoint under evaluation, and whether a model can be its reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.merge.logical import count_layers
from flexquant.merge.merged import MergedCheckpoint
from flexquant.quantization.hub import explained


@dataclass(frozen=True)
class Subject:
    checkpoint: MergedCheckpoint
    num_layers: int
    vocab_size: int
    max_length: int | None
    """Most tokens of a sequence, the config's ``max_position_embeddings``; None: the config has none."""
    tokenizer: Any

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @classmethod
    def open(cls, folder: str | Path) -> Subject:
        """Read headers, config and tokenizer; raise FlexQuantError for anything but a merged checkpoint."""
        checkpoint = MergedCheckpoint.open(folder)
        text_config = checkpoint.config.get("text_config") or checkpoint.config
        return cls(
            checkpoint,
            count_layers(checkpoint.config),
            text_config["vocab_size"],
            text_config.get("max_position_embeddings"),
            load_tokenizer(checkpoint.folder),
        )

    def check_length(self, tokens: int, what: str) -> None:
        """Raise FlexQuantError when ``tokens`` are more than a sequence of the model may have."""
        if self.max_length is not None and tokens > self.max_length:
            raise FlexQuantError(
                f"{what} take {tokens} tokens, but the model's max_position_embeddings is {self.max_length}; "
                "lower --prompt-tokens, --tokens or --answer-tokens"
            )

    def check_reference(self, model: str | Path) -> None:
        """Raise FlexQuantError unless ``model`` is a 16-bit model with this checkpoint's tokens.

        KL divergence compares token by token: with another vocabulary it would mean nothing.
        """
        from transformers import AutoConfig

        with explained(
            f"the reference {model} cannot be read", "give the folder or Hugging Face id of the 16-bit model"
        ):
            config = AutoConfig.from_pretrained(str(model))
        if getattr(config, "quantization_config", None):
            raise FlexQuantError(
                f"the reference {model} is itself quantised; give the 16-bit model that the variants were "
                "made from"
            )
        vocab_size = config.get_text_config().vocab_size
        if vocab_size != self.vocab_size:
            raise FlexQuantError(
                f"the reference {model} has a vocabulary of {vocab_size} tokens, but {self.folder} one of "
                f"{self.vocab_size}; give the 16-bit model that the variants were made from"
            )
        if load_tokenizer(model).get_vocab() != self.tokenizer.get_vocab():
            raise FlexQuantError(
                f"the tokenizers of the reference {model} and of {self.folder} differ; give the 16-bit model "
                "that the variants were made from"
            )


def load_tokenizer(model: str | Path) -> Any:
    """Return the model's tokenizer; raise FlexQuantError when it has none that can be read."""
    from transformers import AutoTokenizer

    with explained(f"the tokenizer of {model} cannot be read", "put its files into the folder"):
        return AutoTokenizer.from_pretrained(str(model))
