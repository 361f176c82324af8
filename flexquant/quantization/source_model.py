# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find, check and hash the 16-bit model, and tell its layers, gates and which norm feeds which linears."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import build_config, build_model, find_model_class
from flexquant.checkpoint.folder import (
    COPIED,
    GENERATION_CONFIG,
    INDEX_FILE,
    SINGLE_FILE,
    find_files,
    find_model,
    read_16_bit_config,
    read_tensors,
)
from flexquant.checkpoint.loadable import ROUTERS
from flexquant.checkpoint.merged_checkpoint import folder_label, hash_tensors
from flexquant.checkpoint.model_config import reads_more_than_text
from flexquant.checkpoint.module_names import LAYER
from flexquant.checkpoint.safetensors_io import DTYPES, TensorRef, read_finite
from flexquant.documents.results import digest_of, hash_file
from flexquant.errors import FlexQuantError, explained, said_by

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

WEIGHT_DTYPES = ("F16", "BF16", "F32")
ADAPTER = "adapter_config.json"
"""File of a LoRA adapter, which transformers would load too."""

ATTENTION = [r"re:.*self_attn\.q_proj$", r"re:.*self_attn\.k_proj$", r"re:.*self_attn\.v_proj$"]
QKV = r"re:.*self_attn\.qkv_proj$"
MLP = [r"re:.*mlp\.gate_proj$", r"re:.*mlp\.up_proj$"]
GATE_UP = r"re:.*mlp\.gate_up_proj$"
UP, DOWN = r"re:.*mlp\.up_proj$", r"re:.*mlp\.down_proj$"

# The norm that feeds the MLP. A model type is listed once its norms are known to feed nothing else.
# fmt: off
MLP_NORM = dict.fromkeys(
    (
        "llama", "mistral", "ministral", "ministral3", "cwm", "hyperclovax", "granite",
        "granite_swa", "smollm3", "seed_oss", "helium", "hunyuan_v1_dense",
        "ernie4_5", "phi3", "glm", "glm4", "qwen2", "qwen3", "gemma", "qwen3_5_text",
    ),
    "post_attention_layernorm",
) | dict.fromkeys(("gemma2", "gemma3_text"), "pre_feedforward_layernorm")
# fmt: on

ATTENTION_NORM_ONLY = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Mixtures of experts: the norm before q, k and v feeds only these; the other norm also feeds a router."""

NORM_BEFORE_STATES = dict.fromkeys(
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1", "granitemoehybrid", "bamba", "jamba"),
    "input_layernorm",
) | {"nemotron_h": "norm", "lfm2": "operator_norm", "lfm2_moe": "operator_norm"}
"""Models with states -> the norm that feeds a layer's first projections, `FIRST`, and nothing else."""
FIRST = re.compile(r"(self_attn\.|mixer\.)[qkv]_proj|linear_attn\.in_proj_\w+|(mamba|mixer|conv)\.in_proj")

LARGE = ("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "q_proj", "k_proj", "v_proj", "g_proj")
"""Last parts of the names of a state's large projections, by which its gates can be told."""
OUT_OF_STATES = ("out_proj", "o_proj")
"""Last parts of the names of the projections behind a state."""

ScaleMapping = tuple[list[str], str]
"""Linears, and the module in front of them, each a name or a regular expression after ``re:``."""


@dataclass(frozen=True)
class SourceModel:
    """A folder in Hugging Face's format that holds a 16-bit model."""

    folder: Path
    label: str
    """The folder's name, or ``org/model@revision``."""
    config: PretrainedConfig
    """transformers' configuration."""
    parameters: int
    weights_sha256: str
    """SHA-256 over all tensors' names, dtypes, shapes and bytes."""
    config_sha256: str
    """SHA-256 of the settings in config.json."""
    files_sha256: Mapping[str, str]
    """Name -> SHA-256 of each file that variants get copies of: tokenizer, chat template, licence ..."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's type of 16 or 32 bit; bfloat16 if its configuration tells none."""
        import torch

        return self.config.dtype if isinstance(self.config.dtype, torch.dtype) else torch.bfloat16


def read_source(folder: Path) -> SourceModel:
    """Read all files of a model folder once, and describe the model.

    Raises FlexQuantError for a configuration or generation settings that transformers refuses, a weight that
    is missing, of another type than float16, bfloat16 or float32, or not finite, and a model for more than
    text.
    """
    from transformers import GenerationConfig

    files, tensors = find_files(folder, COPIED), read_tensors(folder)
    _check_names(folder, tensors)
    written = read_16_bit_config(folder)
    problem = f"cannot read the configuration of {folder}"
    with explained(problem, "name a folder in Hugging Face's format", (Exception,)):
        config = build_config(written)
    settings_file = GENERATION_CONFIG if GENERATION_CONFIG in files else "config.json"
    with explained(f"cannot read the generation settings of {folder}", f"correct {settings_file}"):
        GenerationConfig.from_pretrained(folder, config_file_name=settings_file)
    if reads_more_than_text(written):
        problem = f"{folder} is a model that reads more than text ('{config.model_type}')"
        advice = "quantise its language model with llm-compressor itself, and merge the variants"
        where = "(flexquant/quantization/README.md, 'Vision models')"
        raise FlexQuantError(f"{problem}, and recipes are for text models; {advice} {where}")
    if (model := find_model_class(written, str(folder))) is not None:
        model.check({name: ref.shape for name, ref in tensors.items()}, str(folder))
    hashes = {name: hash_file(path) for name, path in files.items()}
    parameters = sum(math.prod(ref.shape) for ref in tensors.values())
    _check_dtypes(tensors)
    weights = hash_tensors(tensors, read_finite)
    return SourceModel(folder, folder_label(folder), config, parameters, weights, digest_of(written), hashes)


def find_folder(model: str | Path, progress: Callable[[str], None]) -> Path:
    """Return a model's folder, fetched for an id; raise FlexQuantError unless it is whole, in 16 bit."""
    progress(f"looking for {model}")
    folder = find_model(model)
    read_16_bit_config(folder)
    if (folder / ADAPTER).exists():
        problem = f"{folder} holds an adapter ({ADAPTER})"
        raise FlexQuantError(f"{problem}; merge it into the weights with peft, and quantise the result")
    return folder


def _check_names(folder: Path, tensors: Mapping[str, TensorRef]) -> None:
    """Raise FlexQuantError if transformers would load other files of the folder than ``tensors`` are in."""
    read = {ref.file.name for ref in tensors.values()}
    if (folder / SINGLE_FILE).exists() == (folder / INDEX_FILE).exists() and read != {SINGLE_FILE}:
        problem = f"{folder} has its tensors in {', '.join(sorted(read))}, but transformers loads"
        loaded = f"{SINGLE_FILE} or, without that, what {INDEX_FILE} lists"
        raise FlexQuantError(f"{problem} {loaded}; keep the files of one")


def _check_dtypes(tensors: Mapping[str, TensorRef]) -> None:
    """Raise FlexQuantError for a weight that cannot be quantised."""
    for name, ref in sorted(tensors.items()):
        if name.endswith((".weight", ".bias")) and ref.dtype not in WEIGHT_DTYPES:
            problem = f"tensor '{name}' in {ref.file} has dtype {DTYPES[ref.dtype][1] or ref.dtype}"
            needed = "quantising starts from float16, bfloat16 or float32 weights"
            raise FlexQuantError(f"{problem}; {needed}: use the model's 16-bit release")


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model on the meta device; raise FlexQuantError if transformers has another class, or none."""
    import torch
    from transformers import AutoModelForCausalLM

    problem = f"'{config.model_type}' is not a language model that transformers can build"
    with explained(problem, "give a causal language model", (Exception,)), torch.device("meta"):
        model = build_model(AutoModelForCausalLM, config)
    found, named = type(model).__name__, next(iter(config.architectures or ()), "")
    if named and named.lower() != found.lower():
        computed = f"transformers computes the model_type '{config.model_type}' as a {found}"
        advice = "correct config.json, or give a model that transformers has"
        raise FlexQuantError(f"config.json names the architecture {named}, and {computed}; {advice}")
    return model


def gates(model: PreTrainedModel) -> list[str]:
    """Return the names of the linears that stay in 16 bit unless a recipe names them, as publishers do.

    These are what lies outside of the layers, routers, a state's gates and steps of time (in modules with a
    short convolution), and what vLLM computes with them or only in 16 bit: Mamba-1 mixers, Kimi's linear q, k
    and v.
    """
    from torch import nn

    names = [name for name, _ in model.named_modules() if name != "lm_head"]
    found = [name for name in names if name.rpartition(".")[2] in ROUTERS or not LAYER.match(f"{name}.")]
    for name, module in model.named_modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            inside = [own for own, one in module.named_modules() if isinstance(one, nn.Linear)]
            leaves = {own.rpartition(".")[2] for own in inside}
            large = () if {"x_proj", "f_a_proj"} & leaves else LARGE
            behind = () if "x_proj" in leaves else OUT_OF_STATES
            found += [f"{name}.{own}" for own in inside if own not in (*large, *behind)]
    return found


def first_projections(model_type: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the norm in front of each layer of a model with states -> all linears that read it."""
    found: dict[str, list[str]] = {}
    for name in names if model_type in NORM_BEFORE_STATES else ():
        layer = LAYER.match(name)
        if layer is not None and FIRST.fullmatch(name[layer.end() :]):
            found.setdefault(layer[0] + NORM_BEFORE_STATES[model_type], []).append(name)
    return found


def default_mappings(model_type: str, which: str, names: Iterable[str]) -> list[ScaleMapping]:
    """Return the mappings that do not change K and V; none if it is unknown which linears the norms feed.

    Scales move from each norm to all linears that read it and, with ``norms-and-up``, from up_proj to
    down_proj; in a mixture of experts only from the norm to q, k and v. ``names``: of all modules.
    """
    attention, mlp = readers_of_norms(names)
    before_attention: list[ScaleMapping] = [(attention, r"re:.*\.input_layernorm$")]
    if model_type in NORM_BEFORE_STATES:
        before_attention = [(linears, norm) for norm, linears in first_projections(model_type, names).items()]
    if model_type in ATTENTION_NORM_ONLY or model_type not in MLP_NORM:
        known = model_type in ATTENTION_NORM_ONLY or model_type in NORM_BEFORE_STATES
        return before_attention if known else []
    norms = [*before_attention, (mlp, rf"re:.*\.{MLP_NORM[model_type]}$")]
    return norms if which == "norms" or GATE_UP in mlp else [*norms, ([DOWN], UP)]


def readers_of_norms(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return patterns of the linears, fused in Phi-3, that the norms before attention and the MLP feed."""
    ends = {name.rpartition(".")[2] for name in names}
    return [QKV] if "qkv_proj" in ends else ATTENTION, [GATE_UP] if "gate_up_proj" in ends else MLP


def resolve_mappings(
    mappings: Sequence[ScaleMapping], model: PreTrainedModel, model_type: str
) -> dict[str, list[str]]:
    """Return module in front -> linears that get its scales; raise FlexQuantError for a wrong mapping."""
    from compressed_tensors.utils import match_modules_set

    names = {module: name for name, module in model.named_modules()}
    resolved: dict[str, list[str]] = {}
    for balance, smooth in mappings:
        try:
            sets = list(match_modules_set(model, [*balance, smooth]))
        except ValueError as e:
            raise FlexQuantError(f"the mapping from '{smooth}' does not fit this model ({said_by(e)})") from e
        if not sets:
            problem = f"the mapping from '{smooth}' to {', '.join(balance)} matches no module of this model"
            raise FlexQuantError(f"{problem}; correct the names, or leave 'mappings' out")
        for *linears, (front, *more) in sets:
            found = [names[module] for modules in linears for module in modules]
            if more or names[front] in resolved:
                problem = f"two mappings or modules share the linears {', '.join(found)}"
                raise FlexQuantError(f"{problem}; give each mapping one module in front of its linears")
            _check_readers(names[front], found, model_type, names.values())
            resolved[names[front]] = found
    return resolved


def _check_readers(front: str, linears: Sequence[str], model_type: str, names: Collection[str]) -> None:
    first, (attention, mlp) = first_projections(model_type, names), readers_of_norms(names)
    readers = {} if first else {"input_layernorm": attention}
    readers["mlp.up_proj"] = [DOWN]
    if model_type in MLP_NORM:
        readers[MLP_NORM[model_type]] = mlp
    expected = set(first.get(front, ()))
    for suffix, patterns in readers.items():
        if front.endswith(f".{suffix}"):
            layer = front.removesuffix(suffix)
            expected = {layer + re.sub(r"^re:\.\*|\\|\$$", "", pattern) for pattern in patterns}
    if expected and set(linears) != expected:
        needed = f"it has to cover exactly {', '.join(sorted(expected))}, which read it"
        covers = f"the mapping from {front} covers {', '.join(sorted(linears))}"
        raise FlexQuantError(f"{covers}; {needed}, or the model computes something else")
    if not expected and (first or model_type in MLP_NORM or model_type in ATTENTION_NORM_ONLY):
        known = [*readers, *([NORM_BEFORE_STATES[model_type]] if first else [])]
        may = f"in a {model_type} model scales may move from {', '.join(known)} only"
        raise FlexQuantError(f"the mapping from {front} is not known to leave the model as it is; {may}")
