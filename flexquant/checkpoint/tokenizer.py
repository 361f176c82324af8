# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Load the tokenizer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.errors import explained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or Hugging Face id; raise FlexQuantError if it cannot be read."""
    from transformers import AutoTokenizer

    problem = f"the tokenizer of {model} cannot be read"
    # The tokenizers library raises plain Exceptions for a broken file.
    with explained(problem, "put its files beside the weights", (Exception,)):
        return AutoTokenizer.from_pretrained(str(model))
