# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Import names of vLLM that vLLM does not promise to keep.

:mod:`flexquant.serving.vllm_names` lists them with their purposes. Each is looked up in vLLM when it is
imported from here, so a process loads only the modules of vLLM that it needs. The imports below are for type
checkers; a test compares them with the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexquant.serving.vllm_names import CHECKED, module_of

if TYPE_CHECKING:
    from vllm import _custom_ops as _custom_ops
    from vllm import envs as envs
    from vllm._custom_ops import CPUDNNLGEMMHandler as CPUDNNLGEMMHandler
    from vllm.compilation import monitor as monitor
    from vllm.compilation.backends import set_model_tag as set_model_tag
    from vllm.compilation.breakable_cudagraph import (
        is_breakable_cudagraph_enabled as is_breakable_cudagraph_enabled,
    )
    from vllm.compilation.cuda_graph import CUDAGraphWrapper as CUDAGraphWrapper
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config as set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
    from vllm.distributed import init_distributed_environment as init_distributed_environment
    from vllm.distributed import initialize_model_parallel as initialize_model_parallel
    from vllm.distributed.parallel_state import get_pp_group as get_pp_group
    from vllm.distributed.parallel_state import get_tp_group as get_tp_group
    from vllm.distributed.parallel_state import get_world_group as get_world_group
    from vllm.distributed.utils import get_pp_indices as get_pp_indices
    from vllm.forward_context import BatchDescriptor as BatchDescriptor
    from vllm.forward_context import ForwardContext as ForwardContext
    from vllm.forward_context import get_forward_context as get_forward_context
    from vllm.forward_context import override_forward_context as override_forward_context
    from vllm.lora.model_manager import LoRAModelManager as LoRAModelManager
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS as _POSSIBLE_FP8_KERNELS
    from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS as _POSSIBLE_INT8_KERNELS
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS as _POSSIBLE_KERNELS
    from vllm.model_executor.kernels.linear import (
        is_supported_and_can_implement_kernel as is_supported_and_can_implement_kernel,
    )
    from vllm.model_executor.kernels.linear import register_linear_kernel as register_linear_kernel
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import (
        CPUWNA16LinearKernel as CPUWNA16LinearKernel,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.marlin import (
        MarlinLinearKernel as MarlinLinearKernel,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearKernel as MPLinearKernel,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearLayerConfig as MPLinearLayerConfig,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.zentorch import (
        ZentorchWNA16LinearKernel as ZentorchWNA16LinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
        CPUInt8ScaledMMLinearKernel as CPUInt8ScaledMMLinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        Int8ScaledMMLinearLayerConfig as Int8ScaledMMLinearLayerConfig,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.zentorch import (
        ZentorchInt8ScaledMMLinearKernel as ZentorchInt8ScaledMMLinearKernel,
    )
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase as AttentionLayerBase
    from vllm.model_executor.layers.fused_moe import (
        UnquantizedFusedMoEMethod as UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner as MoERunner
    from vllm.model_executor.layers.linear import LinearBase as LinearBase
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as QUANTIZATION_METHODS
    from vllm.model_executor.layers.quantization import (
        register_quantization_config as register_quantization_config,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as QuantizationConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase as QuantizeMethodBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
        CompressedTensorsWNA16MoEMethod as CompressedTensorsWNA16MoEMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsWNA16 as CompressedTensorsWNA16,
    )
    from vllm.model_executor.layers.quantization.utils import replace_parameter as replace_parameter
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        get__quant_fp8_method as get__quant_fp8_method,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        unpack_quantized_values_into_int32 as unpack_quantized_values_into_int32,
    )
    from vllm.model_executor.layers.quantization.utils.w8a8_utils import (
        convert_to_channelwise as convert_to_channelwise,
    )
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT as _ROPE_DICT
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding as VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader.utils import initialize_model as initialize_model
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP as MODELS_CONFIG_MAP
    from vllm.model_executor.models.config import VerifyAndUpdateConfig as VerifyAndUpdateConfig
    from vllm.model_executor.models.idefics3 import (
        Idefics3ForConditionalGeneration as Idefics3ForConditionalGeneration,
    )
    from vllm.model_executor.models.interfaces import SupportsEagle as SupportsEagle
    from vllm.model_executor.models.interfaces import SupportsEagle3 as SupportsEagle3
    from vllm.model_executor.models.interfaces import SupportsLoRA as SupportsLoRA
    from vllm.model_executor.models.interfaces import SupportsMultiModal as SupportsMultiModal
    from vllm.model_executor.models.interfaces import SupportsPP as SupportsPP
    from vllm.scalar_type import scalar_types as scalar_types
    from vllm.sequence import IntermediateTensors as IntermediateTensors
    from vllm.tracing import SpanAttributes as SpanAttributes
    from vllm.usage.usage_lib import UsageContext as UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser
    from vllm.utils.torch_utils import set_default_torch_dtype as set_default_torch_dtype
    from vllm.v1.attention.backend import AttentionBackend as AttentionBackend
    from vllm.v1.attention.backend import CommonAttentionMetadata as CommonAttentionMetadata
    from vllm.v1.attention.backend import subclass_attention_backend as subclass_attention_backend
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor as AdapterLogitsProcessor
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState as DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import (
        MambaHybridModelState as MambaHybridModelState,
    )


def __getattr__(name: str) -> Any:
    module = module_of(name)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'; list it in vllm_names.py")
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except (AttributeError, ImportError) as e:
        raise ImportError(
            f"cannot import '{name}' from '{module}' ({e}); FlexQuant serves with vLLM {CHECKED[0]} to "
            f"{CHECKED[-1]}"
        ) from e
