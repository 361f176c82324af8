# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes small random vision-language models, quantised by rounding to nearest, and images to ask about."""

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

from tests import checkpoints
from tests.architectures.models import small_config
from tests.checkpoints import EXPERTS, ROUTERS, StateDict, base_config, is_quantised, saved_tensors
from tests.states import FAMILIES

Config, Json = type[PretrainedConfig], dict[str, Any]
PIXELS, PATCH, MERGED = 56, 14, 2
"""Width of an image, of the squares it is cut into, and how many of these, in a row, make one token."""
IMAGE_TOKENS = (PIXELS // PATCH // MERGED) ** 2
TOKENS_OF_QWEN = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
FIRST_SPECIAL = 258
"""The id of the first special token, behind those of bytes, of the beginning and of the end."""
TOWER = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": PIXELS, "patch_size": PATCH, "initializer_range": 0.08},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OF_QWEN = {"depth": 2, "num_heads": 4, "out_hidden_size": 128}


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


def text(architecture: str) -> dict[str, Any]:
    return base_config(architecture, num_layers=4).to_dict()


def ids(*special: str) -> dict[str, int]:
    return {name: FIRST_SPECIAL + i for i, name in enumerate(special)}


def whole(config: Config, language: Json, tower: Json, own: Json) -> PretrainedConfig:
    return config(text_config=language, vision_config={**TOWER, **tower}, dtype="bfloat16", **own)


def idefics3() -> PretrainedConfig:
    own = {"scale_factor": MERGED, "pad_token_id": 257, **ids("fake_token_id", "image_token_id")}
    return whole(transformers.Idefics3Config, text("llama"), {}, own)


def qwen2_5_vl() -> PretrainedConfig:
    rope = {**ROPE, "mrope_section": [4, 6, 6]}
    language = text("qwen2") | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    tower = {**OF_QWEN, "window_size": 28, "fullatt_block_indexes": [1]}
    return whole(transformers.Qwen2_5_VLConfig, language, tower, ids(*TOKENS_OF_QWEN))


def qwen3_5(config: Config = transformers.Qwen3_5Config) -> PretrainedConfig:
    rope = {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    language = small_config(f"{config.model_type}_text", rope_parameters=rope, **FAMILIES["qwen3_next"])
    return whole(config, language.to_dict(), OF_QWEN | {"num_position_embeddings": 16}, ids(*TOKENS_OF_QWEN))


def qwen3_vl(architecture: str = "qwen3", config: Config = transformers.Qwen3VLConfig) -> PretrainedConfig:
    rope = {**ROPE, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    language = text(architecture) | {"model_type": f"{config.model_type}_text", "rope_parameters": rope}
    tower = {**OF_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return whole(config, language, tower, ids(*TOKENS_OF_QWEN))


def gemma3() -> PretrainedConfig:
    own = {"mm_tokens_per_image": IMAGE_TOKENS}
    own |= ids("boi_token_index", "image_token_index", "eoi_token_index")
    return whole(transformers.Gemma3Config, text("gemma3"), {"vision_use_head": False}, own)


def mistral3() -> PretrainedConfig:
    own = {"spatial_merge_size": MERGED, "tie_word_embeddings": False, "image_token_index": FIRST_SPECIAL}
    return whole(transformers.Mistral3Config, text("mistral"), {"head_dim": 16, "model_type": "pixtral"}, own)


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


def processor(name: str, of_images: dict[str, Any], **own: Any) -> dict[str, Any]:
    image = {"image_processor_type": f"{name}ImageProcessor", **of_images}
    return {"processor_class": f"{name}Processor", "image_processor": image, **own}


LONGEST, SEQUENCE = {"longest_edge": PIXELS}, {"image_seq_length": IMAGE_TOKENS}
QWEN3 = qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
GATES, SQUARE = "re:.*in_proj_[ab]$", {"height": PATCH, "width": PATCH}
KINDS = {
    "idefics3": Kind(
        idefics3,
        ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
        "<image>",
        processor("Idefics3", {"size": LONGEST, "max_image_size": LONGEST}, image_seq_len=IMAGE_TOKENS),
        ("re:.*vision_model.*", "re:.*connector.*"),
    ),
    "qwen2_5_vl": Kind(qwen2_5_vl, **qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")),
    "qwen3_5": Kind(qwen3_5, **QWEN3, in_16_bit=(GATES,)),
    "qwen3_5_moe": Kind(
        partial(qwen3_5, transformers.Qwen3_5MoeConfig), **QWEN3, in_16_bit=(GATES, EXPERTS, ROUTERS)
    ),
    "qwen3_vl": Kind(qwen3_vl, **QWEN3),
    "qwen3_vl_moe": Kind(
        partial(qwen3_vl, "qwen3_moe", transformers.Qwen3VLMoeConfig),
        **{**QWEN3, "in_16_bit": (EXPERTS, ROUTERS), "transposes_experts": True},
    ),
    "gemma3": Kind(
        gemma3,
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
        "<start_of_image>",
        processor("Gemma3", {"size": {"height": PIXELS, "width": PIXELS}, **SEQUENCE}, **SEQUENCE),
        ("re:.*vision_tower.*", "re:.*multi_modal_projector.*"),
        names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        | {"image_token": "<image_soft_token>"},
        tower="vision_tower.vision_model.",
    ),
    "mistral3": Kind(
        mistral3,
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        processor(
            "Pixtral", {"size": LONGEST, "patch_size": SQUARE}, patch_size=PATCH, spatial_merge_size=MERGED
        ),
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
    state = transform(random_tensors(kind)) if transform else random_tensors(kind)
    quantised = {name for name in state if is_quantised(name, left_out)}
    checkpoints.write_checkpoint(folder, config, state, scheme, quantised, left_out)
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=kind.names)
    tokenizer.add_special_tokens({"additional_special_tokens": list(kind.special)})
    tokenizer.chat_template = CHAT % kind.image
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(kind.processor))
    return folder


TOWERS = {f"{tower}.": f"model.{tower}." for tower in ("vision_tower", "multi_modal_projector")}
LANGUAGE, HEAD = {"language_model.model.": "model.language_model."}, {"language_model.lm_head.": "lm_head."}
RENAMED = {
    **dict.fromkeys(("mistral3", "gemma3"), LANGUAGE | HEAD | TOWERS),
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
    several = prompt(kind, "compare <image> with <image>, please", 2, 3)
    late = "a prompt of more than one chunk, whose image comes in the second of them: <image>"
    return [*same_text(kind), "a prompt without an image", several, prompt(kind, late, 4)]
