# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Import names of vLLM that vLLM does not promise to keep.

Each name is looked up in vLLM when it is imported from here, so a process loads only the modules of vLLM that
it needs. Type checkers take the imports below, which :func:`_modules` reads too; each group says after which
change in vLLM or in FlexQuant its names are not needed any more. ``make check-vllm`` has mypy compare
FlexQuant with the types of each supported vLLM; ``vllm_names.py`` holds what mypy cannot see.
"""

# ruff: noqa: I001  (grouped by reason)

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.serving.vllm_names import CHECKED

if TYPE_CHECKING:
    # Goes when FlexQuant is a part of vLLM.
    from vllm.distributed.parallel_state import get_world_group as get_world_group
    from vllm.distributed.utils import get_pp_indices as get_pp_indices
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as QUANTIZATION_METHODS
    from vllm.model_executor.layers.quantization import (
        register_quantization_config as register_quantization_config,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as QuantizationConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase as QuantizeMethodBase
    from vllm.model_executor.models.interfaces import SupportsEagle as SupportsEagle
    from vllm.model_executor.models.interfaces import SupportsEagle3 as SupportsEagle3
    from vllm.model_executor.models.interfaces import SupportsLoRA as SupportsLoRA
    from vllm.model_executor.models.interfaces import SupportsMRoPE as SupportsMRoPE
    from vllm.model_executor.models.interfaces import SupportsMultiModal as SupportsMultiModal
    from vllm.model_executor.models.interfaces import SupportsPP as SupportsPP
    from vllm.model_executor.models.interfaces import supports_mrope as supports_mrope
    from vllm.model_executor.models.interfaces import supports_multimodal as supports_multimodal
    from vllm.sequence import IntermediateTensors as IntermediateTensors

    # Goes when a quantisation method may take over a checkpoint together with the model class.
    from vllm.transformers_utils.config import HFConfigParser as HFConfigParser
    from vllm.transformers_utils.config import register_config_parser as register_config_parser
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict as get_hf_file_to_dict

    # Goes when plugins may register such a hook.
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP as MODELS_CONFIG_MAP
    from vllm.model_executor.models.config import VerifyAndUpdateConfig as VerifyAndUpdateConfig

    # Goes when breakable graphs hold several plans, or vLLM drops them.
    from vllm.compilation.breakable_cudagraph import (
        is_breakable_cudagraph_enabled as is_breakable_cudagraph_enabled,
    )

    # Goes when vLLM builds a second model over the attention layers of a first.
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase as AttentionLayerBase
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod as UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner as MoERunner
    from vllm.model_executor.layers.mamba.abstract import MambaBase as MambaBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
    from vllm.model_executor.model_loader.utils import initialize_model as initialize_model

    # Goes when vLLM has experts with INT4 weights and 16-bit activations on CPUs.
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
        CompressedTensorsWNA16MoEMethod as CompressedTensorsWNA16MoEMethod,
    )

    # Goes when vLLM compiles several instances of one model class apart by itself.
    from vllm.compilation.backends import set_model_tag as set_model_tag
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config as set_current_vllm_config

    # Goes when vLLM calls a model once for every PIECEWISE graph of every plan.
    from vllm.compilation import monitor as monitor
    from vllm.compilation.cuda_graph import CUDAGraphWrapper as CUDAGraphWrapper
    from vllm.forward_context import BatchDescriptor as BatchDescriptor
    from vllm.forward_context import ForwardContext as ForwardContext
    from vllm.forward_context import override_forward_context as override_forward_context

    # Goes when vLLM captures graphs anew on request, as it pauses on request.
    from vllm.v1.worker import gpu_model_runner as gpu_model_runner
    from vllm.v1.worker.gpu import model_runner as model_runner
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient as AsyncMPClient

    # Goes when vLLM asks plugins for attributes of the span of a request.
    from vllm.tracing import SpanAttributes as SpanAttributes

    # Goes when checkpoint headers are counted instead.
    from vllm.model_executor.layers.linear import LinearBase as LinearBase

    # Goes when vLLM tells how much memory its CPU kernels hold.
    from vllm._custom_ops import CPUDNNLGEMMHandler as CPUDNNLGEMMHandler

    # Goes when vLLM packs no embedding that is only looked up.
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding as VocabParallelEmbedding,
    )

    # Goes when vLLM can be told which modules of a model stand for the same layer of an adapter.
    from vllm.lora.model_manager import LoRAModelManager as LoRAModelManager

    # Goes when the forward context tells the phase of a pass and its number of sequences.
    from vllm.forward_context import get_forward_context as get_forward_context
    from vllm.v1.attention.backend import AttentionBackend as AttentionBackend
    from vllm.v1.attention.backend import CommonAttentionMetadata as CommonAttentionMetadata
    from vllm.v1.attention.backend import subclass_attention_backend as subclass_attention_backend
    from vllm.v1.worker.gpu.input_batch import InputBatch as InputBatch
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState as DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState as MambaHybridModelState

    # Goes when vLLM takes the activations of W4A8 from the model's config, not from the process.
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearKernel as MPLinearKernel,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearLayerConfig as MPLinearLayerConfig,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.marlin import (
        MarlinLinearKernel as MarlinLinearKernel,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsWNA16 as CompressedTensorsWNA16,
    )
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        get__quant_fp8_method as get__quant_fp8_method,
    )
    from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms as get_scale_perms
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_cols as unpack_cols
    from vllm.scalar_type import scalar_types as scalar_types

    # Goes when vLLM's own kernels are right on every CPU (see serving/cpu/kernels.py).
    from vllm import _custom_ops as _custom_ops
    from vllm.model_executor.kernels.linear import register_linear_kernel as register_linear_kernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        Int8ScaledMMLinearLayerConfig as Int8ScaledMMLinearLayerConfig,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        ScaledMMLinearKernel as ScaledMMLinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
        CPUInt8ScaledMMLinearKernel as CPUInt8ScaledMMLinearKernel,
    )
    from vllm.model_executor.layers.quantization.utils import replace_parameter as replace_parameter
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        unpack_quantized_values_into_int32 as unpack_quantized_values_into_int32,
    )
    from vllm.model_executor.layers.quantization.utils.w8a8_utils import (
        convert_to_channelwise as convert_to_channelwise,
    )

    # Goes when vLLM chooses a CPU kernel by the number of tokens, and W4A8 by the layer.
    from vllm import envs as envs
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import (
        CPUWNA16LinearKernel as CPUWNA16LinearKernel,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.zentorch import (
        ZentorchWNA16LinearKernel as ZentorchWNA16LinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.zentorch import (
        ZentorchInt8ScaledMMLinearKernel as ZentorchInt8ScaledMMLinearKernel,
    )

    # Goes when vLLM times single passes on request, and frees an engine's memory on leaving it.
    from vllm.distributed import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory

    # Goes when vLLM scores a given continuation as it is decoded.
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor as AdapterLogitsProcessor

    # Goes when vLLM says without a start which kernels and how much memory a model will have.
    from vllm.distributed import init_distributed_environment as init_distributed_environment
    from vllm.distributed import initialize_model_parallel as initialize_model_parallel
    from vllm.distributed.parallel_state import get_pp_group as get_pp_group
    from vllm.distributed.parallel_state import get_tp_group as get_tp_group
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS as _POSSIBLE_FP8_KERNELS
    from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS as _POSSIBLE_INT8_KERNELS
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS as _POSSIBLE_KERNELS
    from vllm.model_executor.kernels.linear import (
        is_supported_and_can_implement_kernel as is_supported_and_can_implement_kernel,
    )
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT as _ROPE_DICT
    from vllm.usage.usage_lib import UsageContext as UsageContext

    # Goes when vLLM computes INT8 weights from INT4.
    from vllm.triton_utils import tl as tl
    from vllm.triton_utils import triton as triton

    # Goes when the benchmark goes.
    from vllm.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser
    from vllm.utils.torch_utils import set_default_torch_dtype as set_default_torch_dtype


def __getattr__(name: str) -> object:
    module = _modules().get(name)
    if module is None:
        raise AttributeError(
            f"module '{__name__}' has no attribute '{name}'; import it there under its reason"
        )
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except (AttributeError, ImportError) as e:
        raise ImportError(
            f"cannot import '{name}' from '{module}' ({e}); FlexQuant serves with vLLM {CHECKED[0]} to "
            f"{CHECKED[-1]}"
        ) from e


@functools.cache
def _modules() -> dict[str, str]:
    """Return name -> module of vLLM, from the imports above, so that nothing has to be listed twice."""
    imports = [n for n in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(n, ast.ImportFrom)]
    vllms = [node for node in imports if (node.module or "").split(".")[0] == "vllm"]
    return {alias.name: node.module or "" for node in vllms for alias in node.names}
