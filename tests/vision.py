# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes small random vision-language models, quantised by rounding to nearest, and images to ask about.

The models are Idefics3: vLLM serves it without torchvision, which a CPU's vLLM comes without, and which most
other vision models need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
)

from tests.checkpoints import StateDict, base_config, is_quantised, saved_tensors, write_checkpoint

ARCHITECTURE = "Idefics3ForConditionalGeneration"
PIXELS, PATCH, SCALE = 56, 14, 2
IMAGE_TOKENS = (PIXELS // PATCH // SCALE) ** 2
SPECIAL = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
"""Special tokens, with the ids from 258 on: behind those of bytes, of the beginning and of the end."""
TOWERS = ("re:.*vision_model.*", "re:.*connector.*")
"""The parts beside the language model, in the form in which quantising leaves them out."""
CHAT = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
)
PROCESSOR = {
    "processor_class": "Idefics3Processor",
    "image_seq_len": IMAGE_TOKENS,
    "image_processor": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": PIXELS},
        "max_image_size": {"longest_edge": PIXELS},
    },
}


def small_config() -> Idefics3Config:
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": PIXELS,
        "patch_size": PATCH,
        "initializer_range": 0.08,
    }
    return Idefics3Config(
        text_config=base_config("llama", num_layers=4).to_dict(),
        vision_config=vision,
        image_token_id=258 + SPECIAL.index("<image>"),
        scale_factor=SCALE,
        pad_token_id=257,
        dtype="bfloat16",
    )


def random_tensors(config: Idefics3Config) -> StateDict:
    """Return random bf16 tensors as they are published, norms and biases included."""
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    return {
        name: tensor + 0.1 * torch.randn_like(tensor) if "norm" in name or name.endswith("bias") else tensor
        for name, tensor in saved_tensors(model).items()
    }


def make_vision_checkpoint(
    folder: Path,
    scheme: str | None,
    *,
    ignore: Sequence[str] = TOWERS,
    transform: Callable[[StateDict], StateDict] | None = None,
) -> Path:
    """Write a checkpoint folder with tokenizer, processor and chat template, and return it.

    ``scheme`` None writes the 16-bit model; ``ignore`` stays in 16 bit otherwise. ``transform`` edits the
    tensors before they are quantised.
    """
    config = small_config()
    config.architectures = [ARCHITECTURE]
    state = random_tensors(config)
    if transform is not None:
        state = transform(state)
    quantised = {name for name in state if is_quantised(name, ignore)}
    write_checkpoint(folder, config, state, scheme, quantised, ignore)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def picture(seed: int) -> Image.Image:
    """Return an image of coloured noise."""
    noise = torch.randint(0, 256, (PIXELS, PIXELS, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy())
