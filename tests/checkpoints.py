# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Small, real checkpoints made in the test: a random model, quantised by rounding to nearest.

The folders have the layout and tensor names that llmcompressor writes (compressed-tensors), so that
merging and vLLM read them as they read a user's. Good accuracy is not the aim: llmcompressor gives that.
"""

import json
import re
import tempfile
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from benchmarks.speed.synthetic import quantisation_section
from flexquant.checkpoint.folder import read_tensors

StateDict = dict[str, torch.Tensor]
Transform = Callable[[StateDict], StateDict]
Folders = dict[str, Path]
"""Name of a variant -> its folder."""

GEMMA = {"sliding_window": 64, "query_pre_attn_scalar": 32}
ARCHITECTURES = {
    **{"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": None}},
    **{"vaultgemma": GEMMA, "gemma2": GEMMA, "gemma3": GEMMA},
}
"""Model type -> fields of its configuration."""
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
LATENT = {
    "deepseek_v2": {
        "first_k_dense_replace": 99,
        "num_key_value_heads": 4,
        # The only widths that vLLM's CPU backend has.
        **{"kv_lora_rank": 512, "q_lora_rank": 64},
        **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    },
}
"""Configurations with multi-head latent attention."""
LAYER_NORMS: dict[str, dict[str, object]] = {"stablelm": {}}
"""Configurations whose norms have a bias."""
LINEAR = re.compile(r"\.layers\..*(_proj|_proj_with_mqa|_proj_qkv|_proj_z|\.w[123])\.weight$")
ROUTERS = "re:.*\\.(shared_expert_)?gate$"
LATENT_UP = "re:.*kv_b_proj$"
EXPERTS = "re:.*\\.experts\\..*"


def base_config(architecture: str = "llama", num_layers: int = 2, **overrides) -> PretrainedConfig:
    extra = (ARCHITECTURES | MIXTURES | LATENT | LAYER_NORMS)[architecture]
    model_type = "gemma3_text" if architecture == "gemma3" else architecture
    values = {
        **{"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": num_layers},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"max_position_embeddings": 2048, "initializer_range": 0.08, "dtype": "bfloat16"},
        **{"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257},
        "tie_word_embeddings": architecture in ("gemma2", "gemma3"),
    }
    return AutoConfig.for_model(model_type, **{**values, **extra, **overrides})


def random_state_dict(config: PretrainedConfig, seed: int = 0) -> tuple[StateDict, str]:
    """Return a random bf16 state dict, norms and biases included, and the architecture's class name."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {}
    for name, tensor in (saved_tensors(model) if is_mixture(config) else model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "norm" in name or name.endswith(".bias"):
            tensor = tensor + 0.1 * torch.randn_like(tensor)
        state[name] = tensor.contiguous()
    return state, type(model).__name__


def is_mixture(config: PretrainedConfig) -> bool:
    return hasattr(config, "num_experts_per_tok")


def saved_tensors(model: PreTrainedModel) -> StateDict:
    """Return the tensors as they are published: transformers fuses experts' tensors when it loads them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def is_quantised(name: str, ignored: Sequence[str]) -> bool:
    return bool(LINEAR.search(name)) and not any(
        re.match(pattern.removeprefix("re:"), name.removesuffix(".weight")) for pattern in ignored
    )


def quantise_int8(name: str, weight: torch.Tensor) -> StateDict:
    """Quantise to symmetric INT8 per output channel: weight int8 [out, in], weight_scale bf16 [out, 1]."""
    w = weight.float()
    scale = (w.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)
    q = torch.clamp(torch.round(w / scale.float()), -128, 127).to(torch.int8)
    return {name: q, name + "_scale": scale}


def quantise_fp8(name: str, weight: torch.Tensor) -> StateDict:
    """Quantise to FP8 per output channel: weight float8_e4m3fn [out, in], weight_scale bf16 [out, 1]."""
    w = weight.float()
    scale = (w.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).to(torch.bfloat16)
    return {name: (w / scale.float()).to(torch.float8_e4m3fn), name + "_scale": scale}


def quantise_int4(name: str, weight: torch.Tensor, group_size: int) -> StateDict:
    """Quantise to symmetric INT4 in input groups: packed int32 [out, in/8], scale bf16 [out, in/group]."""
    out_features, in_features = weight.shape
    w = weight.float().view(out_features, in_features // group_size, group_size)
    scale = (w.abs().amax(dim=2, keepdim=True) / 7.5).to(torch.bfloat16)
    q = torch.clamp(torch.round(w / scale.float()), -8, 7).to(torch.int8).view(out_features, in_features)
    return {
        name + "_packed": pack_to_int32(q, 4),
        name + "_scale": scale.view(out_features, -1),
        name + "_shape": torch.tensor(weight.shape),
    }


def byte_tokenizer(config: PretrainedConfig) -> FastTokenizer:
    """Return a tokenizer with one token a byte, so that any text can be fed to a random model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return FastTokenizer(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def save_shards(state: StateDict, folder: Path, num_shards: int) -> None:
    if num_shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: state[name] for name in sorted(state)[i::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def load_all(folder: Path) -> StateDict:
    """Return the tensors of all safetensors files, by safetensors itself."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def fold_final_norm(state: StateDict) -> StateDict:
    """Move the final norm's weight into the lm_head: the model stays the same with another norm and head."""
    head, norm = state["lm_head.weight"].float(), state["model.norm.weight"].float()
    folded = {"lm_head.weight": head * norm, "model.norm.weight": torch.ones_like(norm)}
    return state | {name: tensor.to(torch.bfloat16) for name, tensor in folded.items()}


def make_checkpoint(
    folder: Path | str,
    architecture: str = "llama",
    scheme: str | None = "w8a8",
    *,
    seed: int = 0,
    num_layers: int = 2,
    group_size: int = 64,
    num_shards: int = 1,
    transform: Transform | None = None,
    ignore: Sequence[str] = (),
    **config_overrides,
) -> Path:
    """Write a checkpoint folder and return it.

    Variants of one model share ``seed``. ``scheme`` None writes the plain 16-bit model. ``ignore`` names
    linears that stay in 16 bit, as regular expressions after ``re:``, e.g. :data:`EXPERTS`. ``transform``
    edits the 16-bit state dict before it is quantised (a SmoothQuant fold, a rotation ...).
    """
    config = base_config(architecture, num_layers, **config_overrides)
    state, class_name = random_state_dict(config, seed)
    if transform is not None:
        state = transform(state)
    config.architectures = [class_name]
    left_out = [ROUTERS] * is_mixture(config) + [LATENT_UP] * (architecture in LATENT) + [*ignore]
    quantised = {name for name in state if is_quantised(name, left_out)}
    return write_checkpoint(
        Path(folder), config, state, scheme, quantised, left_out, group_size=group_size, num_shards=num_shards
    )


def make_pair(folder: Path, architecture: str = "llama", change: Transform | None = None, **both) -> Folders:
    """Write w8a8 and w4a16 of one model and return their folders.

    ``change`` edits the 16-bit state dict of w4a16; ``both`` are options of :func:`make_checkpoint`.
    """
    return {
        "w8a8": make_checkpoint(folder / "w8a8", architecture, "w8a8", **both),
        "w4a16": make_checkpoint(folder / "w4a16", architecture, "w4a16", transform=change, **both),
    }


def write_checkpoint(
    folder: Path,
    config: PretrainedConfig,
    state: StateDict,
    scheme: str | None,
    quantised: Set[str],
    ignore: Sequence[str],
    *,
    group_size: int = 64,
    num_shards: int = 1,
) -> Path:
    """Write the checkpoint of a state dict; ``quantised`` names the weights that get the scheme.

    ``ignore`` is the list of linears that the config says are not quantised.
    """
    folder.mkdir(parents=True)
    quantise = {
        "w8a8": quantise_int8,
        "fp8": quantise_fp8,
        "w4a16": lambda name, w: quantise_int4(name, w, group_size),
        None: lambda name, w: {name: w},
    }[scheme]
    tensors: StateDict = {}
    for name, tensor in state.items():
        tensors |= quantise(name, tensor) if name in quantised else {name: tensor}
    save_shards({k: v.contiguous().clone() for k, v in tensors.items()}, folder, num_shards)
    document = config.to_dict()
    if scheme is not None:
        document["quantization_config"] = section = quantisation_section(scheme, group_size)
        section["ignore"] += ignore
    (folder / "config.json").write_text(json.dumps(document, indent=2))
    byte_tokenizer(config).save_pretrained(folder)
    return folder


def flip_a_byte(folder: Path, key: str) -> str:
    """Change one bit in the last byte of a tensor; return the name of the tensor's file."""
    ref = read_tensors(folder)[key]
    data = bytearray(ref.file.read_bytes())
    data[ref.begin + ref.nbytes - 1] ^= 1
    ref.file.write_bytes(data)
    return ref.file.name
