# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open the merged checkpoint under evaluation, and check that a model can be its reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.known_models import load_tokenizer
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.model_config import count_layers, text_config
from flexquant.errors import FlexQuantError, explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Subject:
    """A merged checkpoint, with the properties of its model that an evaluation needs."""

    checkpoint: MergedCheckpoint
    num_layers: int
    vocab_size: int
    max_length: int | None
    """Most tokens of a sequence: the config's ``max_position_embeddings``, or None if it has none."""
    tokenizer: PreTrainedTokenizerBase

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @classmethod
    def open(cls, folder: str | Path) -> Subject:
        """Read headers, config and tokenizer; raise FlexQuantError for anything but a merged checkpoint."""
        checkpoint = MergedCheckpoint.open(folder)
        config = text_config(checkpoint.config)
        return cls(
            checkpoint,
            count_layers(checkpoint.config),
            config["vocab_size"],
            config.get("max_position_embeddings"),
            load_tokenizer(checkpoint.folder),
        )

    def check_length(self, tokens: int, what: str) -> None:
        """Raise FlexQuantError if a sequence of the model cannot have so many ``tokens``."""
        if self.max_length is not None and tokens > self.max_length:
            raise FlexQuantError(
                f"{what} take {tokens} tokens, but the model's max_position_embeddings is {self.max_length}; "
                "lower --prompt-tokens, --tokens or --answer-tokens"
            )

    def check_reference(self, model: str | Path) -> None:
        """Raise FlexQuantError unless ``model`` is a 16-bit model with this checkpoint's tokenizer.

        KL divergence is meaningless between different vocabularies.
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
