# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Do with vLLM's types what FlexQuant does with objects of type Any, and call the methods that vLLM calls.

``make check-vllm`` has mypy check this file against each version of vLLM; nothing imports it. Each function
says after which change in vLLM or in FlexQuant it is not needed any more.
"""

from typing import Any

import torch
from torch import nn
from vllm import EngineArgs
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel as Int8Kernel
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.model_executor.models.interfaces import (
    IsHybrid,
    SupportsEagle3,
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def _runners(v1: GPUModelRunner, v2: V2Runner, batch: InputBatch, worker: CPUWorker) -> Any:
    """Goes when vLLM captures graphs anew on request, and tells plugins which passes are its own."""
    v1.capture_model()
    v1.cudagraph_dispatcher.keys_initialized = False
    v2.capture_model()
    if v2.cudagraph_manager is not None:
        v2.cudagraph_manager.graphs.clear()
        v2.cudagraph_manager._graphs_captured = False
    worker.load_model(load_dummy_weights=False)
    return batch.req_ids


def _attention(layer: Attention, builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> Any:
    """Goes when the forward context tells the phase of a pass and its number of sequences."""
    builder.build(0, common, fast_build=False)
    builder.build_for_cudagraph_capture(common)
    states = DefaultModelState.prepare_attn, MambaHybridModelState.prepare_attn
    backend: type[AttentionBackend] = layer.attn_backend
    return [backend, builder.layer_names, *states]


def _kv_cache(layer: AttentionLayerBase, vllm_config: VllmConfig) -> Any:
    """Goes when vLLM says without a start how much memory a model will have."""
    spec: KVCacheSpec | None = layer.get_kv_cache_spec(vllm_config)
    return spec and (spec.block_size, spec.page_size_bytes)


def _layers(
    linear: LinearBase, columns: ColumnParallelLinear, rows: RowParallelLinear, experts: MoERunner
) -> Any:
    """Goes when vLLM builds a second model over the attention layers of a first."""
    experts.layer_name = ""
    moe: FusedMoEConfig = experts.routed_experts.moe_config
    sizes = moe.hidden_dim, moe.intermediate_size_per_partition, moe.num_local_experts, moe.is_act_and_mul
    # A torch module has a Tensor or a module for any other name.
    whole: tuple[int, int] = linear.input_size, linear.output_size
    parts: tuple[int, int] = columns.output_size_per_partition, rows.input_size_per_partition
    methods: tuple[QuantizeMethodBase | None, ...]
    methods = linear.quant_method, experts.routed_experts.quant_method
    return [*sizes, *whole, *parts, *methods]


def _quantisation(config: QuantizationConfig, method: QuantizeMethodBase, layer: nn.Module) -> Any:
    """Goes when FlexQuant is a part of vLLM; vLLM calls these methods of FlexQuant's config."""
    from flexquant.checkpoint.merged_config import MergedConfig
    from flexquant.serving.registration import FlexQuantConfig

    merged: MergedConfig = MergedConfig.from_json({})
    FlexQuantConfig(merged)  # no method is left abstract
    method.create_weights(layer)
    method.process_weights_after_loading(layer)
    config.get_quant_method(layer, "")
    config.get_supported_act_dtypes()
    of_class = config.get_min_capability(), config.get_config_filenames(), config.from_config({})
    return [config.get_name(), *of_class, VerifyAndUpdateConfig.verify_and_update_config]


def _kernels(
    int4: MPLinearKernel, c: MPLinearLayerConfig, int8: Int8Kernel, layer: nn.Module, x: torch.Tensor
) -> Any:
    """Goes when vLLM's own kernels are right on every CPU; vLLM calls these methods of FlexQuant's."""
    from flexquant.serving.kernels.cpu_kernels import ExactCPUInt8LinearKernel
    from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel

    TorchCPUInt4LinearKernel(c, "", "", "")
    ExactCPUInt8LinearKernel(int8.config, int8.layer_param_names)
    int4.process_weights_after_loading(layer)
    int8.process_weights_after_loading(layer)
    products = int4.apply_weights(layer, x, None), int8.apply_weights(layer, x, None)
    of_class = MPLinearKernel.get_min_capability(), MPLinearKernel.can_implement(c)
    return [*products, *of_class, c.act_type, int4.config, int4.w_q_name, int4.w_s_name, int4.w_zp_name]


def _models(
    image: SupportsMultiModal,
    eagle: SupportsEagle3,
    piped: SupportsPP,
    lora: SupportsLoRA,
    mapper: WeightsMapper,
) -> Any:
    """Goes when FlexQuant is a part of vLLM."""
    eagle.set_aux_hidden_state_layers((1,))
    image.embed_multimodal()
    image.get_placeholder_str("image", 0)
    names = lora.embedding_modules, lora.packed_modules_mapping, lora.lora_manager, mapper.apply_list([""])
    return [image.get_language_model(), image.embed_input_ids, piped.make_empty_intermediate_tensors, *names]


def _adapters(manager: LoRAModelManager, layer: BaseLinearLayerWithLoRA, head: ParallelLMHead) -> Any:
    """Goes when vLLM can be told which modules of a model stand for the same layer of an adapter."""
    head.tie_weights(head)
    matrices: tuple[tuple[torch.Tensor, ...], ...] = layer.lora_a_stacked, layer.lora_b_stacked
    return [manager.modules.pop(""), *matrices]


def _scoring(processor: AdapterLogitsProcessor, params: Any) -> Any:
    """Goes when vLLM scores a given continuation as it is decoded."""
    return [processor.is_argmax_invariant(), processor.new_req_logits_processor(params)]


def _configs(config: ModelConfig, arguments: EngineArgs) -> Any:
    """Goes when FlexQuant is a part of vLLM."""
    arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    return [config.registry, ModelRegistry.is_pp_supported_model([""], config)]


def _states(layer: MambaBase, model: IsHybrid, config: VllmConfig) -> None:
    """Goes when vLLM builds a second model over the attention layers of a first."""
    state: tuple[torch.Tensor, ...] = layer.kv_cache
    layer.kv_cache = state
    layer.get_kv_cache_spec(config)
    layer.get_attn_backend()
    model.get_mamba_state_shape_from_config(config)
    model.get_mamba_state_copy_func()
