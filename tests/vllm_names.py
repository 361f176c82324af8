# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""vLLM internals that mypy cannot check, which FlexQuant needs beyond what its own types say.

:data:`PUBLIC` names are imported from vLLM wherever they are needed, every other from
:mod:`flexquant.serving.vllm_api`, which gives the reason. mypy finds what a version renames, moves or calls
with other arguments, but for two kinds of use: what FlexQuant does with objects of type Any, and the methods
that vLLM calls (``vllm_uses.py`` does the same with vLLM's types); and names in strings, environment
variables and attributes that vLLM gives to any object (:data:`NAMES`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

CHECKED = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""Versions of vLLM on which all names were checked."""

NEEDED = {
    "0.27.1": "vLLM calls a model's process_weights_after_loading: handed on to the variants",
    "0.29.0": "vLLM unties a model whose files hold an lm_head: a variant without one is tied again",
    "0.30.0": "layers have no g_idx any more: PyTorch's INT4 kernel and the choice of kernels ask for it "
    "only where there is one",
    "0.32.0": "vLLM asks which shards a model does not want, and names a plan's compiled code by its tag",
    "0.33.0": "a W4A16 layer has no kernel in batch-invariant mode: a policy with W4A8 is refused there",
}
"""Version of vLLM -> what FlexQuant does for it, beyond what older versions needed."""

EXPECTED = {
    "flexquant/serving/worker/model.py: Cannot assign to a method": (
        *("0.26.0", "0.27.1"),
        "make_empty_intermediate_tensors is a method of SupportsPP, which vLLM's models exchange too",
    ),
    'flexquant/serving/worker/model.py: Signature of "forward" incompatible with supertype': (
        *("0.26.0", "0.27.1", "SupportsPP.forward has a narrower type than vLLM's models return"),
    ),
}
"""Error of mypy -> the first and last version that has it, and why it is harmless there."""


@dataclass(frozen=True)
class Names:
    """Names that occur in one module of vLLM and are hidden from mypy."""

    module: str
    mentions: Mapping[str, str]
    """Attributes (``name``, ``object.name``), environment variables and operators, with their purposes."""
    since: tuple[int, int] | None = None
    """First minor version that has them, None: the oldest; FlexQuant needs none of them before."""
    until: tuple[int, int] | None = None
    """Last minor version that has them, None: the newest; FlexQuant needs none of them after."""


PUBLIC: dict[str, tuple[str, ...]] = {
    "vllm": ("EngineArgs", "LLM", "RequestOutput", "SamplingParams", "TokensPrompt"),
    "vllm.config": ("CompilationMode", "CUDAGraphMode", "ModelConfig", "VllmConfig"),
    "vllm.logger": ("init_logger",),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.platforms": ("PlatformEnum", "current_platform"),
}
"""Module of vLLM -> names that may be imported from it anywhere."""

NAMES = (
    # Goes when vLLM calls a model once for every PIECEWISE graph of every plan.
    Names(
        "vllm.compilation.cuda_graph",
        {
            "self.concrete_cudagraph_entries": "whether a wrapper holds a graph of a size",
            "self.runtime_mode": "FULL graphs go when another policy is taken",
        },
    ),
    # Goes when vLLM builds a second model over the attention layers of a first.
    Names(
        "vllm.model_executor.model_loader.utils",
        {"vllm_config": "initialize_model's", "prefix": "the same", "model_class": "the same"},
    ),
    Names(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        {"experts_cls": "the kernel of the experts, for logs"},
    ),
    Names(
        "vllm.config.model",
        {"word_embeddings_untied_by_checkpoint": "whether to tie a variant's lm_head again"},
        since=(0, 29),
    ),
    # Goes when FlexQuant is a part of vLLM.
    Names(
        "vllm.model_executor.models.registry",
        {
            "has_inner_state": "in vLLM's description of a class: taken from the base model's",
            **dict.fromkeys(("is_attention_free", "is_hybrid", "has_noops"), "the same"),
        },
    ),
    Names(
        "vllm.model_executor.models.registry", {"supports_mamba_prefix_caching": "the same"}, until=(0, 32)
    ),
    Names(
        "vllm.model_executor.models.interfaces",
        {
            "multimodal_embeddings": "those of images, for the embeddings that a pass begins with",
            "is_multimodal": "where they go",
            "hf_to_vllm_mapper": "a variant's, for adapters; maps the names of modules that are shared",
            "supports_lora": "base models without it are refused",
        },
    ),
    # Goes when vLLM loads what it has compiled ahead of time for a CPU.
    Names("vllm.envs", {"VLLM_USE_AOT_COMPILE": "written: 0, so that Inductor keeps the code"}),
    # Goes when vLLM compiles several instances of one model class apart by itself.
    Names(
        "vllm.compilation.decorators",
        {
            "compiled": "whether a model has been compiled; set anew on a plan",
            "do_not_compile": "whether a model will be compiled",
            "vllm_config": "the config a model is compiled under; a plan's differs in additional_config",
        },
    ),
    Names(
        "vllm.compilation.decorators",
        {"_compile_tag": "names a plan's artefacts; set_model_tag does where it is not read"},
        since=(0, 32),
    ),
    # Goes when FlexQuant is a part of vLLM.
    Names(
        "vllm.model_executor.layers.linear",
        {"input_size_per_partition": "a linear's on this rank", "output_size_per_partition": "the same"},
    ),
    # Goes when vLLM tells how much memory its CPU kernels hold.
    Names(
        "vllm.model_executor.layers.utils",
        {"layer.cpu_linear": "a function around a 16-bit weight that a CPU kernel has packed"},
    ),
    # Goes when vLLM asks every model which tensors it wants.
    Names(
        "vllm.model_executor.model_loader.default_loader",
        {"is_unused_checkpoint_weight": "shards that need not be opened; without it all are"},
        since=(0, 32),
    ),
    # Goes when no supported base model defines the hook, and vLLM tells a model that its weights are packed.
    Names(
        "vllm.model_executor.model_loader.utils",
        {"model.process_weights_after_loading": "handed on to the variants; then bytes are counted"},
        since=(0, 27),
    ),
    # Goes when vLLM asks a model, not its class, how images are read.
    Names(
        "vllm.model_executor.models.interfaces",
        {"_processor_factory": "the base class's, which prepares its images"},
    ),
    Names(
        "vllm.model_executor.models.interfaces",
        {"supports_mm_device_do_normalize": "the base class's: whether its tower scales an image's values"},
        since=(0, 32),
    ),
    # Goes when the forward context tells the phase of a pass and its number of sequences.
    Names(
        "vllm.v1.worker.gpu.model_states",
        {"get_model_state_cls": "the V2 runner asks a model for that class"},
    ),
    # Goes when vLLM takes the activations of W4A8 from the model's config, not from the process.
    Names(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        {"layer.scheme": "tells INT4 layers by their scheme"},
    ),
    # Goes when vLLM's own kernels are right on every CPU (see serving/kernels/cpu_kernels.py).
    Names(
        "vllm.model_executor.kernels.linear",
        {
            "CPUInt8ScaledMMLinearKernel": "replaced, by name, in VLLM_DISABLED_KERNELS",
            "CPUWNA16LinearKernel": "replaced, by name, in VLLM_DISABLED_KERNELS",
        },
    ),
    Names("vllm.envs", {"VLLM_DISABLED_KERNELS": "written: the kernels that FlexQuant's replace"}),
    Names(
        "vllm._custom_ops",
        {"torch.ops._C.cpu_gemm_wna16": "missing from the AVX2 library, unlike its kernel"},
    ),
    # Goes when vLLM chooses a CPU kernel by the number of tokens, and W4A8 by the layer.
    Names(
        "vllm.envs",
        {"VLLM_CACHE_ROOT": "where the choice is kept", "VLLM_CPU_INT4_W4A8": "0 turns vLLM's W4A8 off"},
    ),
    Names(
        "vllm.model_executor.kernels.linear.mixed_precision.zentorch",
        {
            "_maybe_process_da8w4_weights": "whether this vLLM makes W4A8 of a layer",
            "_zentorch_da8w4": "whether it has",
        },
        since=(0, 31),
    ),
    # Goes when vLLM's LLM has options for them.
    Names(
        "vllm.envs",
        {
            "VLLM_CPU_KVCACHE_SPACE": "written: less than nine tenths of the memory",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "written: evaluation makes the same batches every time",
            "VLLM_NO_USAGE_STATS": "written",
            "VLLM_USE_V2_MODEL_RUNNER": "written: evaluation's logits processor is the V1 runner's",
        },
    ),
    # Goes when 0.29 is no longer supported.
    Names(
        "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel",
        {"has_g_idx": "activation ordering by group, refused"},
        until=(0, 29),
    ),
    # Goes when vLLM captures graphs anew on request, as it pauses on request.
    Names(
        "vllm.v1.worker.block_table",
        {
            "self.block_tables": "the blocks of requests under way, hidden from a capture by the V1 runner",
            "self.block_table.cpu": "one group's, which vLLM copies to the device before each pass",
        },
    ),
    Names(
        "vllm.v1.worker.worker_base",
        {"self.model_runner": "a worker extension's, with the model and its graphs"},
    ),
)
"""Grouped by the change in vLLM or in FlexQuant after which they are not needed any more."""
