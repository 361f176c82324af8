# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Open a merged checkpoint for reading: its config, its tensors and its provenance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.hub import find_model
from flexquant.checkpoint.merged_config import SHARED_PREFIX, MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.provenance import Provenance, read_provenance
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.served_config import read_model_config
from flexquant.errors import FlexQuantError


@dataclass(frozen=True)
class MergedCheckpoint:
    """The folder that ``flexquant merge`` wrote."""

    folder: Path
    config: JsonObject
    """The whole ``config.json``."""
    merged: MergedConfig
    tensors: dict[str, TensorRef]
    """Merged key, prefix included -> reference to the tensor."""
    provenance: Provenance

    @classmethod
    def open(cls, folder: str | Path, *, published: bool = False) -> MergedCheckpoint:
        """Read headers and configs; raise FlexQuantError for an unsound or foreign checkpoint.

        ``published``: take a published INT4 checkpoint too, as one with a single variant.
        """
        folder = find_model(folder)
        config, merged = read_model_config(folder)
        if not published and any(not variant.prefix for variant in merged.variants.values()):
            raise FlexQuantError(f"{folder} is no merged checkpoint; create one with 'flexquant merge'")
        tensors = read_tensors(folder)
        prefixes = (SHARED_PREFIX, *(v.prefix for v in merged.variants.values()))
        for key in tensors:
            if not key.startswith(prefixes):
                raise FlexQuantError(
                    f"{folder} holds tensor '{key}', which belongs to none of its variants "
                    f"({', '.join(merged.variants)}); merge it again"
                )
        return cls(folder, config, merged, tensors, read_provenance(folder))

    def check_variant(self, name: str) -> None:
        """Raise FlexQuantError unless the checkpoint has the variant."""
        if name not in self.merged.variants:
            raise FlexQuantError(
                f"{self.folder} has no variant '{name}'; it has {', '.join(self.merged.variants)}"
            )

    def variant_keys(self, name: str) -> dict[str, str]:
        """Return a variant's tensors, shared ones included: original key -> merged key."""
        own = self.merged.variants[name].prefix
        return {
            key.removeprefix(prefix): key
            for prefix in (SHARED_PREFIX, own)
            for key in self.tensors
            if key.startswith(prefix)
        }

    def variant_tensors(self, name: str) -> dict[str, TensorRef]:
        """Return a variant's tensors, shared ones included, by original key."""
        return {original: self.tensors[key] for original, key in self.variant_keys(name).items()}

    def source_config(self, name: str) -> JsonObject:
        """Return the ``config.json`` that the variant had before merging (without ``_name_or_path``)."""
        config = {
            **self.config,
            "architectures": [self.merged.base_architecture],
            "quantization_config": self.merged.variants[name].quantization_config,
        }
        origin = self.provenance.sources.get(name, {})
        if origin.get("transformers_version"):
            config["transformers_version"] = origin["transformers_version"]
        return config
