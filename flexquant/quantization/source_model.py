# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find, check and hash the 16-bit model before any calibration."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import build_config
from flexquant.checkpoint.folder import (
    COPIED,
    GENERATION_CONFIG,
    INDEX_FILE,
    SINGLE_FILE,
    find_files,
    read_16_bit_config,
    read_tensors,
)
from flexquant.checkpoint.hub import find_model
from flexquant.checkpoint.merged_checkpoint import folder_label
from flexquant.checkpoint.model_class import find_model_class
from flexquant.checkpoint.model_config import reads_more_than_text
from flexquant.checkpoint.safetensors_io import CHUNK_BYTES, DTYPES, TensorRef, read_finite
from flexquant.documents.results import digest_of, hash_file
from flexquant.errors import FlexQuantError, explained

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

WEIGHT_DTYPES = ("F16", "BF16", "F32")
ADAPTER = "adapter_config.json"
"""File of a LoRA adapter, which transformers would load too."""


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

    Raises FlexQuantError for a configuration that transformers does not know, generation settings that it
    refuses, a weight that is missing, is not float16, bfloat16 or float32, or holds NaN or infinity (the
    message names the tensor), and a model that reads more than text.
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
        raise FlexQuantError(
            f"{folder} is a model that reads more than text ('{config.model_type}'), and recipes are for "
            "text models; quantise its language model with llm-compressor itself, and merge the variants "
            "(flexquant/quantization/README.md, 'Vision models')"
        )
    if (model := find_model_class(written, str(folder))) is not None:
        model.check({name: ref.shape for name, ref in tensors.items()}, str(folder))
    hashes = {name: hash_file(path) for name, path in files.items()}
    parameters = sum(math.prod(ref.shape) for ref in tensors.values())
    weights = _hash_weights(tensors)
    return SourceModel(folder, folder_label(folder), config, parameters, weights, digest_of(written), hashes)


def find_folder(model: str | Path, progress: Callable[[str], None]) -> Path:
    """Return a model's folder; a Hugging Face id is fetched.

    Raises FlexQuantError if there is no such model, and for one that is quantised, or an adapter.
    """
    progress(f"looking for {model}")
    folder = find_model(model)
    read_16_bit_config(folder)
    if (folder / ADAPTER).exists():
        raise FlexQuantError(
            f"{folder} holds an adapter ({ADAPTER}); merge it into the weights with peft, and quantise the "
            "result"
        )
    return folder


def _check_names(folder: Path, tensors: Mapping[str, TensorRef]) -> None:
    """Raise FlexQuantError if transformers would load other files of the folder than ``tensors`` are in."""
    read = {ref.file.name for ref in tensors.values()}
    if (folder / SINGLE_FILE).exists() == (folder / INDEX_FILE).exists() and read != {SINGLE_FILE}:
        raise FlexQuantError(
            f"{folder} has its tensors in {', '.join(sorted(read))}, but transformers loads {SINGLE_FILE} "
            f"or, without that, what {INDEX_FILE} lists; keep the files of one"
        )


def _hash_weights(tensors: Mapping[str, TensorRef]) -> str:
    """Return the SHA-256 over all tensors; raise FlexQuantError for a weight that cannot be quantised."""
    digest = hashlib.sha256()
    for name, ref in sorted(tensors.items()):
        is_weight = name.endswith((".weight", ".bias"))
        if is_weight and ref.dtype not in WEIGHT_DTYPES:
            raise FlexQuantError(
                f"tensor '{name}' in {ref.file} has dtype {DTYPES[ref.dtype][1] or ref.dtype}; quantising "
                "starts from float16, bfloat16 or float32 weights: use the model's 16-bit release"
            )
        digest.update(f"{name} {ref.dtype} {ref.shape}\n".encode())
        for chunk in read_finite(ref, 16 * CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
