# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the section of a merged checkpoint's ``config.json`` (FORMAT.md), and read what is served by it.

A published checkpoint in INT4 or 16 bit is read as a merged one with the variant ``w4a16`` or ``bf16`` alone.
Nothing here imports torch or vLLM.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, StrictBool, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from flexquant.checkpoint.folder import read_config, wrong_key
from flexquant.checkpoint.loadable import COMPRESSED_TENSORS
from flexquant.checkpoint.model_config import AWQ, GPTQ, JsonObject, count_layers, with_groups
from flexquant.checkpoint.module_names import HEAD, is_for_heads
from flexquant.checkpoint.schemes import LINEAR
from flexquant.documents.yaml_document import read_named
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
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
QUANT_METHOD = "flexquant"
SCHEMA_VERSION = 1
NESTED_SCHEMA_VERSION = 2
"""Of a checkpoint with a nested variant, whose key an older FlexQuant would pass over."""
SHARED = "shared"
"""Key, in place of a variant's name, of what several variants share; no variant can have this name."""
SHARED_PREFIX = f"{SHARED}."
VARIANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
NOT_COMPARED = {"compatible": False, "message": "the merge did not compare them"}
"""What is read where a merge has recorded nothing of the KV caches."""
METHODS = (COMPRESSED_TENSORS, AWQ, GPTQ)
"""Formats of published checkpoints that are served; a merged one has the first alone."""
PUBLISHED_INT4 = ("w4a16", "one-copy")
PUBLISHED_16_BIT = ("bf16", "prefill-8-bit")
"""A published checkpoint's only variant, and the built-in policy that serves it unless another is given."""


def served_architecture(base_architecture: str) -> str:
    """Return the class that serves a merged checkpoint: one for text, one a model that reads images."""
    return f"FlexQuant{base_architecture}" if base_architecture in VISION_ARCHITECTURES else ARCHITECTURE


def check_variant_name(name: str) -> None:
    """Raise :class:`FlexQuantError` unless ``name`` can prefix tensor keys and appear in a policy."""
    if name == SHARED or not VARIANT_NAME.fullmatch(name):
        problem = f"'{name}' is not a variant name: use lower-case letters, digits, '-' and '_'"
        raise FlexQuantError(f"{problem}, starting with a letter or digit, and not 'shared'")


@dataclass(frozen=True)
class StoredVariant:
    """A quantised copy of the model: the prefix of its tensors, and how they are quantised."""

    prefix: StrictStr
    quantization_config: JsonObject
    """The source checkpoint's ``quantization_config`` (compressed-tensors); without groups in 16 bit."""
    own_head: StrictBool
    """Whether its lm_head differs from its embedding."""
    negative_scales: StrictBool
    """Whether some scale of its packed weights is negative, as AutoRound makes them."""
    nested_in: StrictStr | None = None
    """The variant with whose INT4 weights its INT8 weights are computed; None: they are stored."""

    @property
    def is_in_16_bit(self) -> bool:
        section = self.quantization_config or {"quant_method": COMPRESSED_TENSORS}
        return section.get("quant_method") == COMPRESSED_TENSORS and not section.get("config_groups")

    def to_json(self) -> JsonObject:
        return {key: value for key, value in vars(self).items() if key != "nested_in" or value is not None}


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
    kv_compatibility: JsonObject = Field(default_factory=lambda: {"compatible": True})
    """Result of the KV-cache comparison while merging: ``compatible`` (bool), and why not: ``message``."""
    draft_heads: StrictStr | None = None
    """The variant whose heads that predict further tokens (MTP) a server drafts with; None: it has none."""

    @property
    def mixable_groups(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(self.variants),) if self.mixable is None else self.mixable

    @property
    def nested(self) -> dict[str, str]:
        """Variant whose INT8 weights are not stored -> the one with whose INT4 weights it computes them."""
        return {name: v.nested_in for name, v in self.variants.items() if v.nested_in is not None}

    @property
    def layered_plans(self) -> bool:
        """Whether one plan can mix layers of all variants."""
        return len(self.mixable_groups) == 1

    def may_share_cache(self, variants: Collection[str]) -> bool:
        """Whether these variants may read one another's KV cache; those that can be mixed may."""
        are_mixable = not self.layered_plans and any({*variants} <= {*group} for group in self.mixable_groups)
        return len(variants) == 1 or self.kv_compatibility["compatible"] or are_mixable

    def check_key(self, key: str, place: str = "the merged checkpoint") -> None:
        """Raise FlexQuantError for a tensor of no variant, and one variant's of a shared module."""
        problem = "" if key.startswith(SHARED_PREFIX) else "belongs to none of its variants"
        for variant in self.variants.values():
            if key.startswith(variant.prefix):
                shared = tuple(f"{variant.prefix}{module}." for module in self.shared_modules)
                is_copy = not variant.own_head and HEAD.search(key)
                is_wrong = key.startswith(shared) and not is_copy
                problem = "is of one variant, though shared_modules has its module" if is_wrong else ""
        if problem:
            which = f"which {problem} ({', '.join(self.variants)})"
            raise FlexQuantError(f"{place} holds tensor '{key}', {which}; merge it again")

    def to_json(self) -> JsonObject:
        return {
            "quant_method": QUANT_METHOD,
            "schema_version": NESTED_SCHEMA_VERSION if self.nested else SCHEMA_VERSION,
            "base_architecture": self.base_architecture,
            "shared_prefix": SHARED_PREFIX,
            "variants": {name: variant.to_json() for name, variant in self.variants.items()},
            "shared_modules": list(self.shared_modules),
            "layered_plans": self.layered_plans,
            "mixable": [list(group) for group in self.mixable_groups],
            "rescaled": list(self.rescaled),
            "kv_compatibility": self.kv_compatibility,
            **({"draft_heads": self.draft_heads} if self.draft_heads is not None else {}),
            **({"policy": self.policy} if self.policy is not None else {}),
        }

    @classmethod
    def from_json(cls, section: JsonObject | None) -> Self:
        """Read the section; raise :class:`FlexQuantError` for none, and for a foreign or incomplete one."""
        section = section or {}
        if section.get("quant_method") != QUANT_METHOD:
            found = f"not a merged checkpoint: quant_method is {section.get('quant_method')!r}"
            raise FlexQuantError(f"{found}, expected '{QUANT_METHOD}'; create one with 'flexquant merge'")
        version = section.get("schema_version")
        if type(version) is not int or version not in (SCHEMA_VERSION, NESTED_SCHEMA_VERSION):
            known = f"this FlexQuant reads versions {SCHEMA_VERSION} and {NESTED_SCHEMA_VERSION}"
            problem = f"the merged checkpoint has schema_version {version!r}, but {known}"
            raise FlexQuantError(f"{problem}; upgrade flexquant, or merge again with this version")
        try:
            keys = {"kv_compatibility": NOT_COMPARED, **section, "mixable": None}
            read: Self = TypeAdapter(MergedConfig).validate_python(keys)
            wrong = read._contradictions(section)
            said = (f"{of} has {key} {found!r:.100}, expected {right}" for of, key, found, right in wrong)
            problem = next(said, "")
        except ValidationError as e:
            problem = f"quantization_config has {wrong_key(e)}"
        if problem:
            raise FlexQuantError(f"the merged checkpoint's {problem}; merge it again")
        if "rescaled" not in section:
            read = replace(read, rescaled=tuple(read.variants)[1:])
        return replace(read, mixable=tuple(map(tuple, section["mixable"])))

    def _contradictions(self, section: JsonObject) -> Iterator[tuple[str, str, object, str]]:
        """Yield what has a wrong value, its key, the value, and what it should be."""
        whole, names = "quantization_config", ", ".join(self.variants)
        for name, variant in self.variants.items():
            check_variant_name(name)
            owner, stored = f"variant '{name}'", variant.quantization_config
            is_published = len(self.variants) == 1 and variant.prefix == ""
            if variant.prefix != f"{name}." and not is_published:
                yield owner, "prefix", variant.prefix, f"'{name}.'"
            methods = METHODS if is_published else METHODS[:1]
            is_known = stored.get("quant_method") in methods or stored in ({}, {"config_groups": {}})
            groups = stored.get("config_groups", {})
            are_objects = isinstance(groups, dict) and all(
                isinstance(group, dict) and isinstance(group.get(key) or {}, dict)
                for group in groups.values()
                for key in ("weights", "input_activations")
            )
            if not is_known or not are_objects:
                yield owner, whole, stored, f"one of {COMPRESSED_TENSORS}"
            source = self.variants.get(variant.nested_in or "")
            if variant.nested_in is not None and (source is None or source.nested_in is not None):
                yield owner, "nested_in", variant.nested_in, "another variant that is not nested itself"
        if (prefix := section.get("shared_prefix", SHARED_PREFIX)) != SHARED_PREFIX:
            yield whole, "shared_prefix", prefix, f"'{SHARED_PREFIX}'"
        if self.base_architecture.startswith("FlexQuant"):
            yield whole, "base_architecture", self.base_architecture, "the class of a published model"
        if self.draft_heads not in (None, *self.variants):
            yield whole, "draft_heads", self.draft_heads, f"one of {names}"
        if not {*self.rescaled} <= self.variants.keys():
            yield whole, "rescaled", self.rescaled, f"some of {names}"
        if type(self.kv_compatibility.get("compatible")) is not bool:
            yield whole, "kv_compatibility", self.kv_compatibility, "'compatible' in it, true or false"
        lists: Any = section.get("mixable")
        are_lists = isinstance(lists, list) and all(isinstance(group, list) and group for group in lists)
        if not are_lists or sorted(map(str, chain.from_iterable(lists))) != sorted(self.variants):
            yield whole, "mixable", lists, f"lists that name each of {names} once"


def read_model_config(folder: Path) -> tuple[JsonObject, MergedConfig]:
    """Return a served checkpoint's ``config.json``, and its section; raise FlexQuantError for others."""
    try:
        config = read_config(folder)
    except FlexQuantError as e:
        raise FlexQuantError(f"{e}; give the folder that 'flexquant merge' wrote") from e
    if why_not_served(config, str(folder)) is None:
        config = as_merged(config, str(folder))
    try:
        merged = MergedConfig.from_json(config.get("quantization_config"))
        count_layers(config)
        return config, merged
    except FlexQuantError as e:
        raise FlexQuantError(f"{folder / CONFIG_FILE}: {e}") from e


def read_merged_config(folder: Path) -> tuple[MergedConfig, int]:
    """Return what :func:`read_model_config` does of the variants, and the number of decoder layers."""
    config, merged = read_model_config(folder)
    return merged, count_layers(config)


def has_int4(config: JsonObject, model: str) -> bool:
    """Whether a config tells of INT4 weights and 16-bit activations; raise FlexQuantError if it is wrong."""
    section = with_groups(config.get("quantization_config") or {}, model)
    groups = section["config_groups"].values() if section.get("quant_method") in METHODS else ()
    linears = [g for g in groups if isinstance(g, dict) and not is_for_heads(g.get("targets") or [LINEAR])]
    weights = [g.get("weights") for g in linears if not g.get("input_activations")]
    int4 = ("int", 4)
    return any(isinstance(w, dict) and (w.get("type", "int"), w.get("num_bits")) == int4 for w in weights)


def is_published(folder: Path | str) -> bool:
    """Whether a folder holds a published checkpoint that FlexQuant serves."""
    try:
        config = read_config(Path(folder))
        return why_not_served(config, str(folder)) is None and as_merged(config, str(folder)) is not config
    except FlexQuantError:
        return False


def why_not_served(config: JsonObject, model: str) -> str | None:
    """Return why FlexQuant does not serve the published checkpoint ``model``; None if it does."""
    section = config.get("quantization_config")
    if not section or section.get("quant_method") == QUANT_METHOD or has_int4(config, model):
        return None
    served = "checkpoints in 16 bit and with INT4 weights (compressed-tensors, AWQ, GPTQ) as they are"
    why = f"{model} is quantised by {section.get('quant_method')}, and FlexQuant serves {served}"
    advice = "For several precisions of the model, merge two of them with 'flexquant merge'"
    return f"{why}: vLLM serves this one by itself. {advice}"


def as_merged(config: JsonObject, model: str) -> JsonObject:
    """Return ``config``, of the published checkpoint ``model``, as that of a merged one without prefixes.

    A merged one is returned as it is. Raises FlexQuantError if it names no architecture.
    """
    section = config.get("quantization_config") or {}
    if section.get("quant_method") == QUANT_METHOD:
        return config
    if not isinstance(architecture := next(iter(config.get("architectures") or []), None), str):
        problem = f"{model} names no architecture in its config.json"
        raise FlexQuantError(f"{problem}; give a causal language model, or what 'flexquant merge' wrote")
    name, policy = PUBLISHED_INT4 if section else PUBLISHED_16_BIT
    merged = MergedConfig(
        base_architecture=architecture,
        variants={name: StoredVariant("", with_groups(section, model) if section else {}, True, False)},
        policy=yaml.safe_load(read_named(policy, "flexquant.policies", "policy")[0]),
        draft_heads=name,
    )
    own = {"architectures": [served_architecture(architecture)], "quantization_config": merged.to_json()}
    return config | own
