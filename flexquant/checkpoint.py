# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The on-disk contract of a merged checkpoint, shared by merging (writes it) and serving (reads it).

A merged checkpoint is a Hugging Face folder: ``config.json`` of the base model whose
``quantization_config`` is the section described by :class:`MergedConfig`, and safetensors shards whose
keys are ``<variant>.<original key>``, or ``shared.<original key>`` for a tensor that is bit-identical in
all variants. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError

ARCHITECTURE = "FlexQuantForCausalLM"
QUANT_METHOD = "flexquant"
SCHEMA_VERSION = 1
SHARED_PREFIX = "shared."
VARIANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


def check_variant_name(name: str) -> None:
    """Raise :class:`FlexQuantError` unless ``name`` can prefix tensor keys and appear in a policy."""
    if name == SHARED_PREFIX.rstrip(".") or not VARIANT_NAME.fullmatch(name):
        raise FlexQuantError(
            f"'{name}' is not a variant name: use lower-case letters, digits, '-' and '_', "
            "starting with a letter or digit, and not 'shared'"
        )


@dataclass(frozen=True)
class Variant:
    """One quantised copy of the model: where its tensors are and how they are quantised."""

    prefix: str
    """Prefix of the variant's tensor keys, dot included."""
    quantization_config: dict[str, Any]
    """The source checkpoint's ``quantization_config``, verbatim (compressed-tensors)."""


@dataclass(frozen=True)
class MergedConfig:
    """The ``quantization_config`` section of a merged checkpoint's ``config.json``."""

    base_architecture: str
    """The ``architectures[0]`` of every source, e.g. ``LlamaForCausalLM``."""
    variants: dict[str, Variant]
    shared_modules: tuple[str, ...] = ()
    """Modules outside the decoder layers whose tensors are all shared, e.g. ``model.embed_tokens``."""
    layered_plans: bool = True
    """Whether layers of different variants may be mixed in one plan (equal residual streams)."""
    policy: dict[str, Any] | None = None
    """The default policy document (schema ``flexquant.policy/v1``); None: the built-in default."""
    kv_compatibility: dict[str, Any] = field(default_factory=dict)
    """What the KV-cache comparison found when merging; for people, not read when serving."""

    def to_json(self) -> dict[str, Any]:
        return {
            "quant_method": QUANT_METHOD,
            "schema_version": SCHEMA_VERSION,
            "base_architecture": self.base_architecture,
            "shared_prefix": SHARED_PREFIX,
            "variants": {
                name: {"prefix": v.prefix, "quantization_config": v.quantization_config}
                for name, v in self.variants.items()
            },
            "shared_modules": list(self.shared_modules),
            "layered_plans": self.layered_plans,
            "kv_compatibility": self.kv_compatibility,
            **({"policy": self.policy} if self.policy is not None else {}),
        }

    @classmethod
    def from_json(cls, section: dict[str, Any]) -> MergedConfig:
        """Read the section; raise :class:`FlexQuantError` for a foreign, newer or incomplete one."""
        if section.get("quant_method") != QUANT_METHOD:
            raise FlexQuantError(
                f"not a merged checkpoint: quant_method is {section.get('quant_method')!r}, expected "
                f"'{QUANT_METHOD}'; create one with 'flexquant merge'"
            )
        version = section.get("schema_version")
        if not isinstance(version, int) or version < 1:
            raise FlexQuantError(
                f"the merged checkpoint's schema_version is {version!r}, expected a number from 1 to "
                f"{SCHEMA_VERSION}; merge it again"
            )
        if version > SCHEMA_VERSION:
            raise FlexQuantError(
                f"the merged checkpoint has schema version {version}, but this FlexQuant reads up to "
                f"version {SCHEMA_VERSION}; upgrade flexquant, or merge again with this version"
            )
        try:
            variants = {
                name: Variant(v["prefix"], v["quantization_config"])
                for name, v in section["variants"].items()
            }
            architecture = section["base_architecture"]
        except (KeyError, TypeError, AttributeError) as e:
            raise FlexQuantError(
                f"the merged checkpoint's quantization_config is incomplete ({e!r}); merge it again"
            ) from e
        if not variants:
            raise FlexQuantError("the merged checkpoint names no variants; merge it again")
        return cls(
            base_architecture=architecture,
            variants=variants,
            shared_modules=tuple(section.get("shared_modules", ())),
            layered_plans=section.get("layered_plans", True),
            policy=section.get("policy"),
            kv_compatibility=section.get("kv_compatibility", {}),
        )


def read_merged_config(folder: Path) -> tuple[MergedConfig, int]:
    """Return what the ``config.json`` of a merged checkpoint says, and its number of decoder layers.

    Raises :class:`FlexQuantError` for a folder that ``flexquant merge`` did not write.
    """
    path = folder / "config.json"
    advice = "give the folder that 'flexquant merge' wrote"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise FlexQuantError(f"{path} cannot be read as JSON ({e}); {advice}") from e
    try:
        num_layers = int(config.get("text_config", config)["num_hidden_layers"])
        section = config.get("quantization_config") or {}
    except (KeyError, TypeError, AttributeError) as e:
        raise FlexQuantError(f"{path} does not say num_hidden_layers; {advice}") from e
    try:
        return MergedConfig.from_json(section), num_layers
    except FlexQuantError as e:
        raise FlexQuantError(f"{path}: {e}") from e
