# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Draft with a model's own heads (MTP): vLLM's draft class reads them from the merged checkpoint.

vLLM builds the draft beside the model, with the model's quantisation config, and loads it from the model's
checkpoint. A merged checkpoint has several such configs, and prefixes before the names of its tensors. So the
draft gets the config of the variant that has the heads, and a loader that leaves the prefixes out.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import nn
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from flexquant.checkpoint.merged_config import QUANT_METHOD, SHARED_PREFIX, MergedConfig, StoredVariant
from flexquant.serving.registration import FlexQuantConfig
from flexquant.serving.vllm_api import CompressedTensorsConfig

METHOD = "mtp"
"""vLLM's name for drafting with heads of the model, whatever the architecture calls them."""
LOAD_FORMAT = "flexquant_draft_heads"
IN_16_BIT = {"config_groups": {}, "format": "dense", "ignore": ["re:.*"]}
"""A section of compressed-tensors that quantises nothing."""
NO_HEADS = (
    "drafts of a merged checkpoint without heads that predict further tokens (merge a variant that has "
    "them, or name a published checkpoint as 'model' in --speculative-config)"
)
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
    return speculative.model == vllm_config.model_config.model


def as_published(draft: ModelConfig, variant: StoredVariant) -> None:
    """Give a draft that has the config of a merged checkpoint the section of the variant with the heads."""
    if variant.is_in_16_bit:
        del draft.hf_config.quantization_config
    else:
        draft.hf_config.quantization_config = copy.deepcopy(variant.quantization_config)
    draft.quantization = variant.quantization_config.get("quant_method")


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
        extra = {**load_config.model_loader_extra_config, PREFIX: variant.prefix}
        speculative.draft_load_config = replace(
            load_config, load_format=LOAD_FORMAT, model_loader_extra_config=extra
        )


def build_heads_as_stored(vllm_config: VllmConfig, model_class: type[nn.Module]) -> None:
    """In a worker that drafts with heads, have vLLM's draft class build them as their checkpoint stores them.

    vLLM builds them after the model, with the model's quantisation config, to which ``model_class``, the
    class of each variant, has told its names of modules, and which it fuses.
    """
    speculative, config = vllm_config.speculative_config, vllm_config.quant_config
    if speculative is None or speculative.method != METHOD:
        return
    found = VllmConfig.get_quantization_config(speculative.draft_model_config, vllm_config.load_config)
    of_heads = found or CompressedTensorsConfig.from_config(IN_16_BIT)
    if (mapper := getattr(model_class, "hf_to_vllm_mapper", None)) is not None:
        # vLLM 0.26 has the one name, later ones the other.
        rename = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
        of_heads.apply_vllm_mapper(rename())
    assert isinstance(config, FlexQuantConfig)
    config.of_heads = of_heads
    config.packed_modules_mapping = getattr(model_class, "packed_modules_mapping", {})
