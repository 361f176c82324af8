# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Register with vLLM what it needs before it loads a merged checkpoint.

vLLM uses three things, in this order: the quantisation method named in the checkpoint's config
(:class:`FlexQuantConfig`); the architecture's configuration hook (:class:`FlexQuantModelConfig`), which
refuses everything that can be refused before a process is started or a byte is loaded; and the model class,
which is registered by name and imported only by the worker. With ``--config-format flexquant`` a parser of
configurations (:class:`SingleVariantParser`) comes before them.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.models import ModelRegistry

from flexquant.checkpoint.merged_config import (
    ARCHITECTURE,
    QUANT_METHOD,
    VISION_ARCHITECTURES,
    MergedConfig,
    StoredVariant,
    as_merged,
    served_architecture,
    why_not_served,
)
from flexquant.checkpoint.model_config import JsonObject, reads_more_than_text, with_section
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.errors import FlexQuantError
from flexquant.serving.vllm_api import (
    MODELS_CONFIG_MAP,
    QUANTIZATION_METHODS,
    HFConfigParser,
    QuantizationConfig,
    QuantizeMethodBase,
    SpeculativeConfig,
    VerifyAndUpdateConfig,
    get_hf_file_to_dict,
    register_config_parser,
    register_quantization_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.config import ModelConfig, VllmConfig

WORKER_EXTENSION = "flexquant.serving.worker.worker_extension.FlexQuantWorker"
VERIFIED = "FLEXQUANT_VERIFIED"
"""Environment variable with the folder that the front end has verified, so that its API servers skip it."""

STATES = ("has_inner_state", "is_attention_free", "is_hybrid", "has_noops", "supports_mamba_prefix_caching")
"""What vLLM's description of a class says of its layers' states; the last one goes with vLLM 0.33."""

logger = init_logger("vllm.flexquant.registration")


class FlexQuantConfig(QuantizationConfig):
    """The merged checkpoint's ``quantization_config`` for vLLM; each variant has a config of vLLM's own."""

    def __init__(self, merged: MergedConfig) -> None:
        super().__init__()
        self.merged = merged

    def get_name(self) -> str:  # type: ignore[override]
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        # Each variant's own config is asked for its minimum when the variant is built.
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: JsonObject) -> FlexQuantConfig:
        return cls(MergedConfig.from_json(config))

    def has_blocked_weights(self) -> bool:
        """Tell vLLM whether some variant has FP8 weights in blocks, for which it takes another operator."""
        sections = [variant.quantization_config for variant in self.merged.variants.values()]
        groups = chain.from_iterable(section.get("config_groups", {}).values() for section in sections)
        return any((group.get("weights") or {}).get("strategy") == "block" for group in groups)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        problem = f"vLLM builds layer '{prefix}' by another class than FlexQuant's, which alone knows the"
        raise FlexQuantError(f"{problem} variants; leave 'architectures' out of --hf-overrides")


class SingleVariantParser(HFConfigParser):
    """Reads the config of a published checkpoint as that of a merged one with this variant alone.

    Other precisions stay as they are, with a warning; :class:`FlexQuantModelConfig` undoes it for drafts.
    """

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        found, config = super().parse(model, trust_remote_code, revision, code_revision, **options)
        settings = partial(get_hf_file_to_dict, model=model, revision=revision)
        whole = with_section(found, f"{model}/config.json", settings)
        if problem := why_not_served(whole, str(model)):
            logger.warning(problem)
            return found, config
        architectures = whole.get("architectures") or config.architectures
        merged = as_merged({**whole, "architectures": architectures}, str(model))
        for key in ("architectures", "quantization_config"):
            setattr(config, key, merged[key])
        return merged, config


class FlexQuantModelConfig(VerifyAndUpdateConfig):
    """In the front end, reads the policy for all workers, and refuses early what cannot be served."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """In the front end, tell vLLM what states the base architecture's layers keep, which one class hides.

        ReplaySSM, which keeps counters beside a state, is not offered.
        """
        from flexquant.serving.config import merged_of
        from flexquant.serving.draft_heads import MERGED_DRAFTS

        merged = merged_of(model_config)
        if model_config.runner == "draft":
            if merged.draft_heads is None:
                raise FlexQuantError(f"FlexQuant does not support {MERGED_DRAFTS}")
            describe_draft(model_config, merged.base_architecture, merged.variants[merged.draft_heads])
            return
        reads_images = reads_more_than_text(model_config.hf_config.to_dict())
        if reads_images and merged.base_architecture not in VISION_ARCHITECTURES:
            return  # `refusals` says so; vLLM may lack what the architecture needs
        check_sections(model_config, merged)
        try:
            base, _ = model_config.registry.inspect_model_cls([merged.base_architecture], model_config)
        except ValueError as e:
            named = f"which {model_config.model} names as its model (base_architecture, or architectures)"
            problem = f"this vLLM cannot build {merged.base_architecture}, {named}"
            raise FlexQuantError(f"{problem}; update vLLM, or get the checkpoint again") from e
        known = {key: getattr(base, key) for key in STATES if hasattr(base, key)}
        model_config._model_info = dataclasses.replace(model_config._model_info, **known)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        from flexquant.serving import config
        from flexquant.serving.draft_heads import read_from_merged

        merged = config.merged_of(vllm_config.model_config)
        routes = config.resolve_policy(vllm_config, merged)
        config.choose_graph_mode(vllm_config, merged, routes)
        config.fuse_as_for_variants(vllm_config, merged, routes)
        config.find_compiled_code_again()
        read_from_merged(vllm_config, merged)
        verify_if_asked(vllm_config)
        # Extend vLLM's workers by FlexQuant's methods, unless the operator has set another extension.
        parallel = vllm_config.parallel_config
        parallel.worker_extension_cls = parallel.worker_extension_cls or WORKER_EXTENSION
        if base := MODELS_CONFIG_MAP.get(merged.base_architecture):
            base.verify_and_update_config(vllm_config)


def check_sections(model_config: ModelConfig, merged: MergedConfig) -> None:
    """Refuse settings not understood, and a ``--quantization`` that is not the format of every variant."""
    sections = {name: variant.quantization_config for name, variant in merged.variants.items()}
    for name, section in sections.items():
        LinearSchemes(section, f"variant '{name}'", ())
    methods = {section.get("quant_method", "16 bit") for section in sections.values()}
    asked = model_config.quantization or QUANT_METHOD
    if asked != QUANT_METHOD and methods != {asked.removesuffix("_marlin")}:
        stored = f"{model_config.model}, whose variants are in {' and '.join(sorted(methods))}"
        raise FlexQuantError(f"--quantization {asked} is not the format of {stored}; drop --quantization")
    model_config.quantization = QUANT_METHOD


def describe_draft(model_config: ModelConfig, architecture: str, variant: StoredVariant) -> None:
    """Describe a draft to vLLM as if its config were not a merged checkpoint's: vLLM has the class for it."""
    from flexquant.serving.draft_heads import as_published

    config = model_config.hf_config
    config.architectures = [architecture]
    as_published(model_config, variant)
    SpeculativeConfig.hf_config_override(config)  # in place; vLLM has called it with FlexQuant's architecture
    model_config.model_arch_config = model_config.get_model_arch_config()
    inspected = model_config.registry.inspect_model_cls(config.architectures, model_config)
    model_config._model_info, model_config._architecture = inspected


def verify_if_asked(vllm_config: VllmConfig) -> None:
    """In the front end: with the option ``verify``, compare a local checkpoint with its hashes, or raise."""
    from flexquant.checkpoint import merged_checkpoint
    from flexquant.serving.config import ServingOptions

    if not ServingOptions.from_vllm(vllm_config).verify:
        return
    folder = Path(vllm_config.model_config.model)
    if not folder.is_dir():
        problem = f"additional-config 'flexquant.verify' needs a folder on this machine, and {folder} is none"
        raise FlexQuantError(f"{problem}; download the checkpoint first, and serve the folder")
    known = str(folder.resolve())
    if multiprocessing.parent_process() is not None and os.environ.get(VERIFIED) == known:
        return
    checkpoint = merged_checkpoint.MergedCheckpoint.open(folder)
    merged_checkpoint.check_recorded_files(checkpoint)
    count = merged_checkpoint.check_recorded_tensors(checkpoint)
    os.environ[VERIFIED] = known
    logger.info("%s: %d tensors equal to recorded hashes", folder, count)


def register_with_vllm() -> None:
    """Register the quantisation method, the configuration hook and the model classes, once per process."""
    if QUANT_METHOD in QUANTIZATION_METHODS:
        return
    register_quantization_config(QUANT_METHOD)(FlexQuantConfig)
    register_config_parser(QUANT_METHOD)(SingleVariantParser)
    classes = {ARCHITECTURE: "model"} | {served_architecture(base): "vision" for base in VISION_ARCHITECTURES}
    for name, module in classes.items():
        MODELS_CONFIG_MAP[name] = FlexQuantModelConfig
        ModelRegistry.register_model(name, f"flexquant.serving.worker.{module}:{name}")
