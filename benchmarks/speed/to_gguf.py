# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A program: write a 16-bit checkpoint as GGUF in F16, by the classes of llama.cpp's convert_hf_to_gguf.py.

`python to_gguf.py LLAMA_CPP FOLDER FILE`, with the folder of llama.cpp's source. Only the tokenizer is
written otherwise: OpenVINO reads no other than GPT-2's, and llama.cpp knows none of one word a token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NORMAL, CONTROL = 1, 3
"""Kinds of tokens in GGUF."""


def write_words(model: Any, vocabulary: dict[str, int]) -> None:
    """Write the tokenizer of synthetic checkpoints as GPT-2's: it tells tokens' words, and reads no text."""
    import gguf

    words = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word.replace("▁", "Ġ") for word in words])
    writer.add_token_types([NORMAL if word.startswith("▁") else CONTROL for word in words])
    # Both readers want at least one.
    writer.add_token_merges(["t t"])
    gguf.SpecialVocab(model.dir_model, load_merges=False).add_to_gguf(writer)


def convert(llama_cpp: Path, folder: Path, file: Path) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    config = ModelBase.load_hparams(folder, False)
    model_class = get_model_class(get_model_architecture(config, ModelType.TEXT))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]

    def set_vocab(model: Any) -> None:
        if tokenizer["type"] == "WordLevel":
            write_words(model, tokenizer["vocab"])
        else:
            model._set_vocab_gpt2()

    # The class's own would write a tokenizer of SentencePiece's kind where it finds byte fallback.
    model_class.set_vocab = set_vocab
    with torch.inference_mode():
        model_class(folder, gguf.LlamaFileType.MOSTLY_F16, file).write()


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
