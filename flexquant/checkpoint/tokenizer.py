# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.errors import explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hugging Face id; raise FlexQuantError when it cannot be read."""
    from transformers import AutoTokenizer

    problem = f"the tokenizer of {model} cannot be read"
    # What tokenizers raises for a broken file is an Exception.
    with explained(problem, "put its files beside the weights", (Exception,)):
        return AutoTokenizer.from_pretrained(str(model))
