# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A model with its residual stream rotated: the same function, in which no few channels stand out.

    python -m benchmarks.rotated MODEL --output ROTATED

Every variant that is quantised from ROTATED is rotated alike, so that their KV caches fit: keys and values
are not rotated. llm-compressor's SpinQuantModifier rotates (R1, a random Hadamard matrix, since the plain
ones have sizes of powers of two), without its centering of embeddings, which changes what a model with
RMSNorm computes. The script runs in the quantising environment.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from transformers import AutoModelForCausalLM, PreTrainedModel

COPIED = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")


class Rotation(SpinQuantModifier):
    """llm-compressor's rotation, without its centering of the embeddings."""

    def _center_embeddings(self, model: PreTrainedModel) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the 16-bit model")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    oneshot(model=model, recipe=Rotation(rotations=["R1"], transform_type="random-hadamard"))
    # Saved as a plain model: llm-compressor's own saving would have the server apply the rotation again.
    PreTrainedModel.save_pretrained(model.to(torch.bfloat16), args.output)
    for pattern in COPIED:
        for file in args.model.glob(pattern):
            shutil.copy(file, args.output)


if __name__ == "__main__":
    main()
