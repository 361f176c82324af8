# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the on-disk format of a merged checkpoint, which merging writes and serving reads.

A merged checkpoint is a Hugging Face folder: ``config.json`` of the base model whose
``quantization_config`` is the section described by :class:`MergedConfig`, and safetensors shards whose
keys are ``<variant>.<original key>``, or ``shared.<original key>`` for a tensor that is bit-identical in
all variants. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from typing import Annotated

from pydantic import Field, StrictBool, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from flexquant.checkpoint.folder import wrong_key
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

CONFIG_FILE = "config.json"
ARCHITECTURE = "FlexQuantForCausalLM"
VISION_ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Served base architectures that read images as well as text."""
QUANT_METHOD = "flexquant"
SCHEMA_VERSION = 1
SHARED = "shared"
"""Key, in place of a variant's name, of what several variants share; no variant can have this name."""
SHARED_PREFIX = f"{SHARED}."
VARIANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


def served_architecture(base_architecture: str) -> str:
    """Return the name of the class that serves a merged checkpoint, its ``architectures[0]``.

    One class serves all text models. Each vision model has its own, since vLLM asks the class how to read
    images.
    """
    return f"FlexQuant{base_architecture}" if base_architecture in VISION_ARCHITECTURES else ARCHITECTURE


def check_variant_name(name: str) -> None:
    """Raise :class:`FlexQuantError` unless ``name`` can prefix tensor keys and appear in a policy."""
    if name == SHARED or not VARIANT_NAME.fullmatch(name):
        raise FlexQuantError(
            f"'{name}' is not a variant name: use lower-case letters, digits, '-' and '_', "
            "starting with a letter or digit, and not 'shared'"
        )


@dataclass(frozen=True)
class StoredVariant:
    """A quantised copy of the model: the prefix of its tensors, and how they are quantised."""

    prefix: StrictStr
    """Prefix of the variant's tensor keys, dot included."""
    quantization_config: JsonObject
    """The source checkpoint's ``quantization_config`` (compressed-tensors)."""
    own_head: StrictBool | None = None
    """Whether its lm_head differs from its embedding; None: not recorded, by an older release."""
    negative_scales: StrictBool | None = None
    """Whether some scale of its packed weights is negative, as AutoRound makes them; None: not recorded."""


@dataclass(frozen=True)
class MergedConfig:
    """The ``quantization_config`` section of a merged checkpoint's ``config.json``."""

    base_architecture: StrictStr
    """The ``architectures[0]`` of every source, e.g. ``LlamaForCausalLM``."""
    variants: Annotated[dict[StrictStr, StoredVariant], Field(min_length=1)]
    shared_modules: tuple[StrictStr, ...] = ()
    """Modules whose tensors are all shared, e.g. ``model.embed_tokens`` or ``model.layers.0.mlp.experts``."""
    mixable: tuple[tuple[str, ...], ...] | None = None
    """Groups of variants with equal residual streams; one plan can mix layers of one group.

    Every variant is in exactly one group; None: all are in one group.
    """
    rescaled: tuple[StrictStr, ...] = ()
    """Variants with a linear that is scaled or rotated against the first variant's: no LoRA fits both."""
    policy: JsonObject | None = None
    """The default policy document (schema ``flexquant.policy/v1``); None: the built-in default."""
    kv_compatibility: JsonObject = Field(default_factory=dict)
    """Result of the KV-cache comparison while merging; for people, serving does not read it."""

    @property
    def mixable_groups(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(self.variants),) if self.mixable is None else self.mixable

    @property
    def layered_plans(self) -> bool:
        """Whether one plan can mix layers of all variants.

        Older releases of FlexQuant, which do not know ``mixable``, read this key.
        """
        return len(self.mixable_groups) == 1

    def to_json(self) -> JsonObject:
        return {
            "quant_method": QUANT_METHOD,
            "schema_version": SCHEMA_VERSION,
            "base_architecture": self.base_architecture,
            "shared_prefix": SHARED_PREFIX,
            "variants": {
                name: {key: value for key, value in vars(v).items() if value is not None}
                for name, v in self.variants.items()
            },
            "shared_modules": list(self.shared_modules),
            "layered_plans": self.layered_plans,
            "mixable": [list(group) for group in self.mixable_groups],
            "rescaled": list(self.rescaled),
            "kv_compatibility": self.kv_compatibility,
            **({"policy": self.policy} if self.policy is not None else {}),
        }

    @classmethod
    def from_json(cls, section: JsonObject | None) -> MergedConfig:
        """Read the section; raise :class:`FlexQuantError` for none, a foreign, newer or incomplete one."""
        section = section or {}
        if section.get("quant_method") != QUANT_METHOD:
            raise FlexQuantError(
                f"not a merged checkpoint: quant_method is {section.get('quant_method')!r}, expected "
                f"'{QUANT_METHOD}'; create one with 'flexquant merge'"
            )
        version = section.get("schema_version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
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
            read: MergedConfig = TypeAdapter(MergedConfig).validate_python({**section, "mixable": None})
        except ValidationError as e:
            raise FlexQuantError(
                f"the merged checkpoint's quantization_config has {wrong_key(e)}; merge it again"
            ) from e
        return replace(read, mixable=_read_mixable(section, read.variants))


def _read_mixable(section: JsonObject, variants: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of variants; older sections only state whether all variants can be mixed."""
    groups = section.get("mixable")
    if groups is None:
        if section.get("layered_plans", True):
            return (tuple(variants),)
        return tuple((name,) for name in variants)
    sound = isinstance(groups, list) and all(isinstance(group, list) and group for group in groups)
    if not sound or sorted(map(str, chain.from_iterable(groups))) != sorted(variants):
        raise FlexQuantError(
            f"the merged checkpoint's quantization_config has mixable {groups!r}, expected lists that name "
            f"each of {', '.join(variants)} once; merge it again"
        )
    return tuple(map(tuple, groups))
