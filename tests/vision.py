# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes small random vision-language models, quantised by rounding to nearest, and images to ask about."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PretrainedConfig

from tests.architectures.models import small_config
from tests.checkpoints import (
    EXPERTS,
    ROUTERS,
    StateDict,
    base_config,
    is_quantised,
    saved_tensors,
    write_checkpoint,
)
from tests.states import FAMILIES

PIXELS, PATCH, MERGED = 56, 14, 2
"""Width of an image, of the squares it is cut into, and how many of these, in a row, make one token."""
IMAGE_TOKENS = (PIXELS // PATCH // MERGED) ** 2
FIRST_SPECIAL = 258
"""The id of the first special token, behind those of bytes, of the beginning and of the end."""
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": PIXELS,
    "patch_size": PATCH,
    "initializer_range": 0.08,
}


class Kind(NamedTuple):
    """A vision-language architecture: its config, tokens and processor."""

    config: Callable[[], PretrainedConfig]
    special: tuple[str, ...]
    """Special tokens, whose ids begin with FIRST_SPECIAL."""
    image: str
    """What stands for an image in a prompt."""
    processor: dict[str, Any]
    """The contents of processor_config.json."""
    towers: tuple[str, ...]
    """The parts beside the language model, in the form in which quantising leaves them out."""
    in_16_bit: tuple[str, ...] = ()
    """The language model's linears that stay in 16 bit, in the same form."""
    names: dict[str, str] = {}
    """Names of special tokens that the tokenizer knows them by."""
    tower: str = "vision_tower."
    """Where published tensors of the tower are that transformers has below ``vision_tower``."""
    transposes_experts: bool = False
    """Whether published tensors of experts are the transposed ones of transformers."""

    @property
    def architecture(self) -> str:
        return type(self.config()).__name__.removesuffix("Config") + "ForConditionalGeneration"


def text(architecture: str, **overrides: Any) -> dict[str, Any]:
    return base_config(architecture, num_layers=4, **overrides).to_dict()


def ids(*special: str) -> dict[str, int]:
    return {name: FIRST_SPECIAL + i for i, name in enumerate(special)}


def idefics3() -> PretrainedConfig:
    return transformers.Idefics3Config(
        text_config=text("llama"),
        vision_config=TOWER,
        scale_factor=MERGED,
        pad_token_id=257,
        dtype="bfloat16",
        **ids("fake_token_id", "image_token_id"),
    )


def qwen2_5_vl() -> PretrainedConfig:
    tower = {"depth": 2, "num_heads": 4, "out_hidden_size": 128}
    tower |= {"window_size": 28, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    return transformers.Qwen2_5_VLConfig(
        text_config=text("qwen2") | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope},
        vision_config={**TOWER, **tower},
        dtype="bfloat16",
        **ids("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"),
    )


def qwen3_5(config: type[PretrainedConfig] = transformers.Qwen3_5Config) -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    dimensions = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tower = {"depth": 2, "num_heads": 4, "out_hidden_size": 128, "num_position_embeddings": 16}
    language = small_config(
        f"{config.model_type}_text", rope_parameters=rope | dimensions, **FAMILIES["qwen3_next"]
    )
    return config(
        text_config=language.to_dict(),
        vision_config={**TOWER, **tower},
        dtype="bfloat16",
        **ids("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"),
    )


def qwen3_vl(
    architecture: str = "qwen3", config: type[PretrainedConfig] = transformers.Qwen3VLConfig
) -> PretrainedConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
        "mrope_interleaved": True,
    }
    tower = {"depth": 2, "num_heads": 4, "out_hidden_size": 128, "num_position_embeddings": 16}
    language = text(architecture) | {"model_type": f"{config.model_type}_text", "rope_parameters": rope}
    return config(
        text_config=language,
        vision_config={**TOWER, **tower, "deepstack_visual_indexes": [0, 1]},
        dtype="bfloat16",
        **ids("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"),
    )


def gemma3() -> PretrainedConfig:
    return transformers.Gemma3Config(
        text_config=text("gemma3"),
        vision_config={**TOWER, "vision_use_head": False},
        mm_tokens_per_image=IMAGE_TOKENS,
        dtype="bfloat16",
        **ids("boi_token_index", "image_token_index", "eoi_token_index"),
    )


def mistral3() -> PretrainedConfig:
    return transformers.Mistral3Config(
        text_config=text("mistral"),
        vision_config={**TOWER, "head_dim": 16, "model_type": "pixtral"},
        spatial_merge_size=MERGED,
        tie_word_embeddings=False,
        dtype="bfloat16",
        image_token_index=FIRST_SPECIAL,
    )


def qwen(processor: str, video_processor: str) -> dict[str, Any]:
    """Return what the kinds of Qwen's have in common."""
    size = {"size": {"shortest_edge": PIXELS**2, "longest_edge": PIXELS**2}, "patch_size": PATCH}
    return {
        "special": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "processor": {
            "processor_class": processor,
            "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **size},
            "video_processor": {"video_processor_type": video_processor, **size},
        },
        "towers": ("re:.*visual.*",),
    }


KINDS = {
    "idefics3": Kind(
        idefics3,
        ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
        "<image>",
        {
            "processor_class": "Idefics3Processor",
            "image_seq_len": IMAGE_TOKENS,
            "image_processor": {
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": PIXELS},
                "max_image_size": {"longest_edge": PIXELS},
            },
        },
        ("re:.*vision_model.*", "re:.*connector.*"),
    ),
    "qwen2_5_vl": Kind(qwen2_5_vl, **qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")),
    "qwen3_5": Kind(
        qwen3_5,
        **qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
        in_16_bit=("re:.*in_proj_[ab]$",),
    ),
    "qwen3_5_moe": Kind(
        partial(qwen3_5, transformers.Qwen3_5MoeConfig),
        **qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
        in_16_bit=("re:.*in_proj_[ab]$", EXPERTS, ROUTERS),
    ),
    "qwen3_vl": Kind(qwen3_vl, **qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor")),
    "qwen3_vl_moe": Kind(
        partial(qwen3_vl, "qwen3_moe", transformers.Qwen3VLMoeConfig),
        **qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
        in_16_bit=(EXPERTS, ROUTERS),
        transposes_experts=True,
    ),
    "gemma3": Kind(
        gemma3,
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
        "<start_of_image>",
        {
            "processor_class": "Gemma3Processor",
            "image_seq_length": IMAGE_TOKENS,
            "image_processor": {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": PIXELS, "width": PIXELS},
                "image_seq_length": IMAGE_TOKENS,
            },
        },
        ("re:.*vision_tower.*", "re:.*multi_modal_projector.*"),
        names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        | {"image_token": "<image_soft_token>"},
        tower="vision_tower.vision_model.",
    ),
    "mistral3": Kind(
        mistral3,
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {
            "processor_class": "PixtralProcessor",
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "image_processor": {
                "image_processor_type": "PixtralImageProcessor",
                "size": {"longest_edge": PIXELS},
                "patch_size": {"height": PATCH, "width": PATCH},
            },
        },
        ("re:.*vision_tower.*", "re:.*multi_modal_projector.*"),
    ),
}
CHAT = (
    "{%% for message in messages %%}{%% for part in message.content %%}"
    "{{ '%s' if part.type == 'image' else part.text }}{%% endfor %%}{%% endfor %%}"
)


def random_tensors(kind: Kind) -> StateDict:
    """Return random bf16 tensors as they are published, norms, biases and what begins as zeros included."""
    torch.manual_seed(0)
    model = getattr(transformers, kind.architecture)._from_config(kind.config(), dtype=torch.bfloat16)
    state = {}
    for name, tensor in saved_tensors(model).items():
        if "norm" in name or name.endswith("bias") or not tensor.any():
            tensor = tensor + 0.1 * torch.randn_like(tensor)
        if kind.transposes_experts and ".experts." in name:
            tensor = tensor.transpose(1, 2).contiguous()
        state[name.replace("vision_tower.", kind.tower)] = tensor
    return state


def make_vision_checkpoint(
    folder: Path,
    scheme: str | None,
    kind: Kind = KINDS["idefics3"],
    *,
    ignore: Sequence[str] | None = None,
    transform: Callable[[StateDict], StateDict] | None = None,
) -> Path:
    """Write a checkpoint folder with tokenizer, processor and chat template, and return it.

    ``scheme`` None writes the 16-bit model. Otherwise ``ignore``, by default what its kind says, stays in
    16 bit. ``transform`` edits the tensors before they are quantised.
    """
    config, left_out = kind.config(), [*kind.towers, *kind.in_16_bit] if ignore is None else ignore
    config.architectures = [kind.architecture]
    state = random_tensors(kind)
    if transform is not None:
        state = transform(state)
    quantised = {name for name in state if is_quantised(name, left_out)}
    write_checkpoint(folder, config, state, scheme, quantised, left_out)
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=kind.names)
    tokenizer.add_special_tokens({"additional_special_tokens": list(kind.special)})
    tokenizer.chat_template = CHAT % kind.image
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(kind.processor))
    return folder


TOWERS = {f"{tower}.": f"model.{tower}." for tower in ("vision_tower", "multi_modal_projector")}
HEAD = {"language_model.lm_head.": "lm_head."}
RENAMED = {
    "mistral3": {"language_model.model.": "model.language_model."} | HEAD | TOWERS,
    "gemma3": {"language_model.model.": "model.language_model."} | HEAD | TOWERS,
    "qwen2_5_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
}
"""Kind -> beginnings of names as one release of transformers writes them -> as another does."""


def write_as_another_release(folder: Path, kind: str) -> dict[str, str]:
    """Rename a checkpoint's tensors as the other of two releases names them; return old name -> new."""
    file = folder / "model.safetensors"
    state = load_file(file)
    both = {new: old for old, new in RENAMED[kind].items()} | RENAMED[kind]
    begins = {name: next((prefix for prefix in both if name.startswith(prefix)), "") for name in state}
    names = {name: both.get(prefix, "") + name.removeprefix(prefix) for name, prefix in begins.items()}
    save_file({names[name]: tensor for name, tensor in state.items()}, file, metadata={"format": "pt"})
    return names


def picture(seed: int) -> Image.Image:
    """Return an image of coloured noise."""
    noise = torch.randint(0, 256, (PIXELS, PIXELS, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy())


def prompt(kind: Kind, text: str, *images: int) -> dict[str, Any]:
    """Return a prompt with pictures in the places of ``<image>``."""
    pictures = [picture(seed) for seed in images]
    return {"prompt": text.replace("<image>", kind.image), "multi_modal_data": {"image": pictures}}


def same_text(kind: Kind) -> list[dict[str, Any]]:
    return [prompt(kind, "what is in <image>?", seed) for seed in (0, 1)]


def prompts(kind: Kind) -> list[Any]:
    return [
        *same_text(kind),
        "a prompt without an image",
        prompt(kind, "compare <image> with <image>, please", 2, 3),
        prompt(kind, "a prompt of more than one chunk, whose image comes in the second of them: <image>", 4),
    ]
