# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Import names of vLLM that vLLM does not promise to keep.

Each name is looked up in vLLM when it is imported from here, so a process loads only the modules of vLLM that
it needs. Type checkers take the imports, and the lookup reads in this file where they are from. Their groups
say after which change in vLLM or in FlexQuant their names are not needed any more. ``make check-vllm`` has
mypy compare FlexQuant with the types of each supported vLLM.
"""

# ruff: noqa: F401, I001  (imported for others, and grouped by reason)

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Goes when FlexQuant is a part of vLLM.
    from vllm.distributed.parallel_state import get_world_group
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
    from vllm.model_executor.models.interfaces import (
        SupportsEagle,
        SupportsEagle3,
        SupportsLoRA,
        SupportsMRoPE,
        SupportsMultiModal,
        SupportsPP,
        supports_mrope,
        supports_multimodal,
    )
    from vllm.sequence import IntermediateTensors

    # Goes when a quantisation method may take over a checkpoint together with the model class.
    from vllm.transformers_utils.config import HFConfigParser, register_config_parser
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    # Goes when vLLM loads the heads of a draft (MTP) through the model that it drafts for.
    from vllm.config import LoadConfig, SpeculativeConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

    # Goes when plugins may register such a hook.
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    # Goes when breakable graphs hold several plans, or vLLM drops them.
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    # Goes when vLLM builds a second model over the attention layers of a first.
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.utils import initialize_model

    # Goes when vLLM has experts with INT4 weights and 16-bit activations on CPUs.
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
        CompressedTensorsWNA16MoEMethod,
    )

    # Goes when vLLM compiles several instances of one model class apart by itself.
    from vllm.compilation.backends import set_model_tag
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config

    # Goes when vLLM calls a model once for every PIECEWISE graph of every plan.
    from vllm.compilation import monitor
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

    # Goes when vLLM captures graphs anew on request, as it pauses on request.
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    # Goes when vLLM rounds a 16-bit lm_head to INT8.
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    # Goes when vLLM tells how much memory its CPU kernels hold.
    from vllm._custom_ops import CPUDNNLGEMMHandler

    # Goes when vLLM packs no embedding that is only looked up.
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    # Goes when vLLM can be told which modules of a model stand for the same layer of an adapter.
    from vllm.lora.model_manager import LoRAModelManager

    # Goes when the forward context tells the phase of a pass and its number of sequences.
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backend import (
        AttentionBackend,
        CommonAttentionMetadata,
        subclass_attention_backend,
    )
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    # Goes when vLLM takes the activations of W4A8 from the model's config, not from the process.
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearKernel,
        MPLinearLayerConfig,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.cutlass import CutlassW4A8LinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.humming import HummingLinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.machete import MacheteLinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        get__quant_fp8_method,
        get_scale_perms,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_cols
    from vllm.scalar_type import scalar_types

    # Goes when vLLM's own kernels are right on every CPU (see serving/kernels/cpu_kernels.py).
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import HadamardTransform
    from vllm.model_executor.layers.quantization.utils import replace_parameter
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32

    # Goes when vLLM chooses a CPU kernel by the number of tokens, and W4A8 by the layer.
    from vllm import envs
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.zentorch import ZentorchWNA16LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.zentorch import ZentorchInt8ScaledMMLinearKernel

    # Goes when vLLM rotates inputs under tensor parallelism, and without an operator for it.
    from vllm.model_executor.layers.quantization.compressed_tensors.transform import module
    from vllm.model_executor.parameter import SharedWeightParameter

    # Goes when vLLM times its kernels for a model's layers.
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import model_parallel_is_initialized
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    # Goes when vLLM times single passes on request, and frees an engine's memory on leaving it.
    from vllm.distributed import cleanup_dist_env_and_memory

    # Goes when vLLM scores a given continuation as it is decoded.
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    # Goes when vLLM says without a start which kernels and how much memory a model will have.
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group
    from vllm.model_executor.kernels.linear import (
        _POSSIBLE_FP8_KERNELS,
        _POSSIBLE_INT8_KERNELS,
        _POSSIBLE_KERNELS,
        is_supported_and_can_implement_kernel,
    )
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.usage.usage_lib import UsageContext

    # Goes when vLLM computes INT8 weights from INT4.
    from vllm.triton_utils import tl, triton

    # Goes when vLLM parses engine arguments, and sets a default dtype, by public names.
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.torch_utils import set_default_torch_dtype


SUPPORTED = ("0.26.0", "0.33.0")
"""Oldest and newest version of vLLM on which all names were checked."""


def _module_of() -> dict[str, str]:
    """Return name -> the module of vLLM that the imports above take it from."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
            found |= {alias.name: node.module for alias in node.names}
    return found


_MODULE_OF = _module_of()


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        problem = f"module '{__name__}' has no attribute '{name}'"
        raise AttributeError(f"{problem}; import it there under its reason")
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except (AttributeError, ImportError) as e:
        problem = f"cannot import '{name}' from '{module}' ({e})"
        raise ImportError(f"{problem}; FlexQuant serves with vLLM {SUPPORTED[0]} to {SUPPORTED[1]}") from e
