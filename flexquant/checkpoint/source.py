# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open and validate an input of a merge, a compressed-tensors checkpoint, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexquant.checkpoint.folder import check_folder, confined_file, read_json, read_tensors
from flexquant.checkpoint.known_models import check_heads
from flexquant.checkpoint.merged_config import check_variant_name
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.errors import FlexQuantError


@dataclass(frozen=True)
class Source:
    """A checkpoint that becomes the variant ``name`` of the merged one."""

    name: str
    folder: Path
    config: JsonObject
    """The whole ``config.json``."""
    quantization_config: JsonObject
    tensors: dict[str, TensorRef]
    """Original key -> reference into the checkpoint's own shards."""

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    @classmethod
    def open(cls, name: str, folder: str | Path) -> Source:
        """Read headers and configs only; raise FlexQuantError, naming the file, for an unusable folder."""
        check_variant_name(name)
        folder = Path(folder)
        check_folder(folder)
        config_file = confined_file(folder, "config.json")
        config = read_json(config_file)
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not isinstance((architectures or [None])[0], str):
            raise FlexQuantError(f"{config_file} names no architectures; a causal language model is needed")
        section = config.get("quantization_config")
        if not isinstance(section, dict):
            raise FlexQuantError(
                f"{config_file} has no quantization_config; merging needs compressed-tensors checkpoints "
                "such as llmcompressor or 'flexquant quantize' write"
            )
        method = section.get("quant_method")
        if method != "compressed-tensors":
            how = "; convert it by 'flexquant convert'" if method in ("awq", "gptq") else ""
            raise FlexQuantError(
                f"{config_file} has quant_method {method!r}; merging needs compressed-tensors checkpoints "
                f"such as llmcompressor or 'flexquant quantize' write{how}"
            )
        check_heads(config, str(config_file))
        return cls(name, folder, config, section, read_tensors(folder))
