# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Draft with a model's own heads (MTP): vLLM's draft class reads them from the merged checkpoint.

vLLM builds the draft beside the model, with the model's quantisation config, and loads it from the model's
checkpoint. A merged checkpoint has several such configs, and prefixes before the names of its tensors. So the
draft gets the config of the variant that has the heads, and a loader that leaves the prefixes out.
"""

import copy
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig

from flexquant.checkpoint.folder import read_config
from flexquant.checkpoint.merged_config import QUANT_METHOD, SHARED_PREFIX, MergedConfig, StoredVariant
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.serving.vllm_api import (
    CompressedTensorsConfig,
    DefaultModelLoader,
    LoadConfig,
    register_model_loader,
)

METHOD = "mtp"
"""vLLM's name for drafting with heads of the model, whatever the architecture calls them."""
LOAD_FORMAT = "flexquant_draft_heads"
IN_16_BIT = {"config_groups": {}, "format": "dense", "ignore": ["re:.*"]}
"""A section of compressed-tensors that quantises nothing."""
MERGED_DRAFTS = (
    "drafts of a merged checkpoint, but for the heads of the served one that predict further tokens, if it "
    "names any (name a published checkpoint as 'model' in --speculative-config, or, for heads, merge again, "
    "with a variant that has them)"
)
OF_FILES = ("auto", "hf", "safetensors")
"""Load formats that have the options of vLLM's loader for files."""
PREFIX = "prefix"
"""Key of the loader's configuration: the prefix of the variant's tensors, dot included."""


@register_model_loader(LOAD_FORMAT)
class DraftHeadLoader(DefaultModelLoader):
    """Hands vLLM's draft class the tensors of a variant, shared ones too, by their published names."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self._prefixes = (extra.pop(PREFIX), SHARED_PREFIX)
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        # vLLM asks the model by which names a whole file can be skipped, and it knows published names alone.
        is_unused = getattr(model, "is_unused_checkpoint_weight", lambda name: False)

        def is_unused_here(name: str) -> bool:
            published = self._published(name)
            return published is None or is_unused(published)

        asked = nn.Module()
        vars(asked)["is_unused_checkpoint_weight"] = is_unused_here
        for name, tensor in super().get_all_weights(model_config, asked):
            if published := self._published(name):
                yield published, tensor

    def _published(self, name: str) -> str | None:
        """Return a tensor's name in the variant's own checkpoint; None if it is of another variant."""
        prefix = next(filter(name.startswith, self._prefixes), None)
        return None if prefix is None else name.removeprefix(prefix)


def drafts_with_own_heads(vllm_config: VllmConfig) -> bool:
    """Whether vLLM is to draft with heads of the served checkpoint itself."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        return False
    model, own = speculative.model or "", vllm_config.model_config.model
    return model == own or (Path(model).exists() and Path(own).exists() and Path(model).samefile(own))


def drafts_with_other_merged(vllm_config: VllmConfig) -> bool:
    """Whether vLLM is to draft with a merged checkpoint in some other way than with its own heads."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.model or drafts_with_own_heads(vllm_config):
        return False
    try:
        config = read_config(Path(speculative.model))
    except FlexQuantError:
        return False  # no folder here, or a draft that vLLM will not understand
    return (config.get("quantization_config") or {}).get("quant_method") == QUANT_METHOD


def as_published(draft: ModelConfig, variant: StoredVariant) -> None:
    """Give a draft that has the config of a merged checkpoint the section of the variant with the heads."""
    section = variant.quantization_config
    # llmcompressor rotates no heads
    take_section(draft, {key: section[key] for key in section if key != "transform_config"})


def take_section(model_config: ModelConfig, section: JsonObject) -> None:
    """Give a model's config the section of one variant, or, in 16 bit, none."""
    if section:
        model_config.hf_config.quantization_config = copy.deepcopy(section)
    else:
        del model_config.hf_config.quantization_config
    model_config.quantization = section.get("quant_method")


def read_from_merged(vllm_config: VllmConfig, merged: MergedConfig) -> None:
    """In the front end, have vLLM read the draft's heads in the served checkpoint, if it is to."""
    speculative = vllm_config.speculative_config
    if speculative is None or merged.draft_heads is None or not drafts_with_own_heads(vllm_config):
        return
    draft, variant = speculative.draft_model_config, merged.variants[merged.draft_heads]
    if getattr(draft.hf_config, "quantization_config", {}).get("quant_method") == QUANT_METHOD:
        as_published(draft, variant)
    load_config = speculative.draft_load_config or vllm_config.load_config
    if variant.prefix and load_config.load_format != "dummy":
        # A streamer's options are not those of the loader for files.
        options = load_config.model_loader_extra_config if load_config.load_format in OF_FILES else {}
        extra = {**options, PREFIX: variant.prefix}
        speculative.draft_load_config = replace(
            load_config, load_format=LOAD_FORMAT, model_loader_extra_config=extra
        )


def build_heads_as_stored(vllm_config: VllmConfig, model_class: type[nn.Module]) -> None:
    """In a worker that drafts with heads, have vLLM's draft class build them as their checkpoint stores them.

    vLLM builds them with the model's quantisation config. ``model_class``: of the variants.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        return
    found = VllmConfig.get_quantization_config(speculative.draft_model_config, vllm_config.load_config)
    config = found or CompressedTensorsConfig.from_config(IN_16_BIT)
    if (mapper := getattr(model_class, "hf_to_vllm_mapper", None)) is not None:
        # vLLM 0.26 has the one name, later ones the other.
        rename = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
        config.apply_vllm_mapper(rename())
    config.packed_modules_mapping = getattr(model_class, "packed_modules_mapping", {})
    vllm_config.quant_config = config
    # The V2 runner of vLLM 0.26 reads no draft_load_config. The model's own loader has what it needs.
    vllm_config.load_config = speculative.draft_load_config or vllm_config.load_config
