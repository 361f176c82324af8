# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""vLLM internals that mypy cannot check, which FlexQuant needs beyond what its own types say.

:data:`PUBLIC` names, which vLLM documents for users and plugins, are imported from vLLM wherever they are
needed. Every other name is imported from :mod:`flexquant.serving.vllm_api`, which gives the reason. vLLM has
types, so mypy finds what a version renames, moves or calls with other arguments. Two kinds of use are hidden
from mypy: what FlexQuant does with objects of type Any, and the methods that vLLM calls (``vllm_uses.py``
does the same with vLLM's types); and names in strings, environment variables and attributes that vLLM gives
to any object (:data:`NAMES`). The benchmarks, which are not part of the package, import names from vLLM
itself.

``make check-vllm VERSION=...`` checks all of it against any published vLLM, without installing it;
``flexquant/serving/VLLM_VERSIONS.md`` is its answer for the supported ones. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHECKED = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""Versions of vLLM on which all names were checked."""

NEEDED = {
    "0.27.1": "vLLM calls a model's process_weights_after_loading: handed on to the variants",
    "0.29.0": "vLLM unties a model whose files hold an lm_head: a variant without one is tied again",
    "0.30.0": "layers have no g_idx any more: W4A8 asks for it only where there is one",
    "0.32.0": "vLLM asks which shards a model does not want, and names a plan's compiled code by its tag",
    "0.33.0": "a W4A16 layer has no kernel in batch-invariant mode: a policy with W4A8 is refused there",
}
"""Version of vLLM -> what FlexQuant does for it, beyond what older versions needed."""


EXPECTED = {
    "flexquant/serving/worker/model.py: Cannot assign to a method": (
        "0.26.0",
        "0.27.1",
        "make_empty_intermediate_tensors is a method of SupportsPP, which vLLM's models exchange too",
    ),
    'flexquant/serving/worker/model.py: Signature of "forward" incompatible with supertype': (
        "0.26.0",
        "0.27.1",
        "SupportsPP.forward has a narrower type than vLLM's models return",
    ),
}
"""Error of mypy -> the first and last version that has it, and why it is harmless there."""


@dataclass(frozen=True)
class Names:
    """Names that occur in one module of vLLM, become unnecessary together, and are hidden from mypy."""

    module: str
    goes_when: str
    """Change in vLLM or in FlexQuant after which the names are not needed any more."""
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
    Names(
        "vllm.compilation.cuda_graph",
        "vLLM calls a model once for every PIECEWISE graph of every plan",
        {
            "self.concrete_cudagraph_entries": "whether a wrapper holds a graph of a size",
            "self.runtime_mode": "FULL graphs go when another policy is taken",
        },
    ),
    Names(
        "vllm.model_executor.model_loader.utils",
        "vLLM builds a second model over the attention layers of a first",
        {"vllm_config": "initialize_model's", "prefix": "the same", "model_class": "the same"},
    ),
    Names(
        "vllm.model_executor.models.registry",
        "FlexQuant is a part of vLLM",
        {
            "has_inner_state": "in vLLM's description of a class: taken from the base model's",
            "is_attention_free": "the same",
            "is_hybrid": "the same",
            "has_noops": "the same",
            "supports_mamba_prefix_caching": "the same",
        },
    ),
    Names(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        "vLLM builds a second model over the attention layers of a first",
        {"experts_cls": "the kernel of the experts, for logs"},
    ),
    Names(
        "vllm.envs",
        "vLLM loads what it has compiled ahead of time for a CPU",
        {"VLLM_USE_AOT_COMPILE": "written: 0, so that Inductor keeps the code"},
    ),
    Names(
        "vllm.compilation.decorators",
        "vLLM compiles several instances of one model class apart by itself",
        {
            "compiled": "whether a model has been compiled; set anew on a plan",
            "do_not_compile": "whether a model will be compiled",
            "vllm_config": "the config a model is compiled under; a plan's differs in additional_config",
        },
    ),
    Names(
        "vllm.compilation.decorators",
        "vLLM compiles several instances of one model class apart by itself",
        {"_compile_tag": "names a plan's artefacts; set_model_tag does where it is not read"},
        since=(0, 32),
    ),
    Names(
        "vllm.model_executor.layers.linear",
        "checkpoint headers are counted instead",
        {
            "input_size_per_partition": "the size of a linear layer on this rank",
            "output_size_per_partition": "the size of a linear layer on this rank",
        },
    ),
    Names(
        "vllm.model_executor.layers.utils",
        "vLLM tells how much memory its CPU kernels hold",
        {"layer.cpu_linear": "a function around a 16-bit weight that a CPU kernel has packed"},
    ),
    Names(
        "vllm.model_executor.model_loader.default_loader",
        "vLLM asks every model which tensors it wants",
        {"is_unused_checkpoint_weight": "shards that need not be opened; without it all are"},
        since=(0, 32),
    ),
    Names(
        "vllm.model_executor.model_loader.utils",
        "no supported base model defines the hook, and vLLM tells a model that its weights are packed",
        {"model.process_weights_after_loading": "handed on to the variants; then bytes are counted"},
        since=(0, 27),
    ),
    Names(
        "vllm.model_executor.models.interfaces",
        "FlexQuant is a part of vLLM",
        {
            "multimodal_embeddings": "those of images, for the embeddings that a pass begins with",
            "is_multimodal": "where they go",
            "hf_to_vllm_mapper": "a variant's, for adapters; maps the names of modules that are shared",
            "supports_lora": "base models without it are refused",
        },
    ),
    Names(
        "vllm.model_executor.models.interfaces",
        "vLLM asks a model, not its class, how images are read",
        {"_processor_factory": "the base class's, which prepares its images"},
    ),
    Names(
        "vllm.model_executor.models.interfaces",
        "vLLM asks a model, not its class, how images are read",
        {"supports_mm_device_do_normalize": "the base class's: whether its tower scales an image's values"},
        since=(0, 32),
    ),
    Names(
        "vllm.v1.worker.gpu.model_states",
        "the forward context tells the phase of a pass and its number of sequences",
        {"get_model_state_cls": "the V2 runner asks a model for that class"},
    ),
    Names(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        "vLLM takes the activations of W4A8 from the model's config, not from the process",
        {"layer.scheme": "tells INT4 layers by their scheme"},
    ),
    Names(
        "vllm.model_executor.kernels.linear",
        "vLLM's own kernels are right on every CPU (see serving/kernels/cpu_kernels.py)",
        {
            "CPUInt8ScaledMMLinearKernel": "replaced, by name, in VLLM_DISABLED_KERNELS",
            "CPUWNA16LinearKernel": "replaced, by name, in VLLM_DISABLED_KERNELS",
        },
    ),
    Names(
        "vllm.envs",
        "vLLM's own kernels are right on every CPU (see serving/kernels/cpu_kernels.py)",
        {"VLLM_DISABLED_KERNELS": "written: the kernels that FlexQuant's replace"},
    ),
    Names(
        "vllm.envs",
        "vLLM chooses a CPU kernel by the number of tokens, and W4A8 by the layer",
        {"VLLM_CACHE_ROOT": "where the choice is kept", "VLLM_CPU_INT4_W4A8": "0 turns vLLM's W4A8 off"},
    ),
    Names(
        "vllm.model_executor.kernels.linear.mixed_precision.zentorch",
        "vLLM chooses a CPU kernel by the number of tokens, and W4A8 by the layer",
        {
            "_maybe_process_da8w4_weights": "whether this vLLM makes W4A8 of a layer",
            "_zentorch_da8w4": "whether it has",
        },
        since=(0, 31),
    ),
    Names(
        "vllm._custom_ops",
        "vLLM's own kernels are right on every CPU (see serving/kernels/cpu_kernels.py)",
        {"torch.ops._C.cpu_gemm_wna16": "missing from the AVX2 library, unlike its kernel"},
    ),
    Names(
        "vllm.envs",
        "vLLM's LLM has options for them",
        {
            "VLLM_CPU_KVCACHE_SPACE": "written: less than nine tenths of the memory",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "written: evaluation makes the same batches every time",
            "VLLM_NO_USAGE_STATS": "written",
            "VLLM_USE_V2_MODEL_RUNNER": "written: evaluation's logits processor is the V1 runner's",
        },
    ),
    Names(
        "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel",
        "0.29 is no longer supported",
        {"has_g_idx": "activation ordering by group, refused"},
        until=(0, 29),
    ),
    Names(
        "vllm.config.model",
        "vLLM builds a second model over the attention layers of a first",
        {"word_embeddings_untied_by_checkpoint": "whether to tie a variant's lm_head again"},
        since=(0, 29),
    ),
    Names(
        "vllm.v1.worker.block_table",
        "vLLM captures graphs anew on request, as it pauses on request",
        {
            "self.block_tables": "the blocks of requests under way, hidden from a capture by the V1 runner",
            "self.block_table.cpu": "one group's, which vLLM copies to the device before each pass",
        },
    ),
    Names(
        "vllm.v1.worker.worker_base",
        "vLLM captures graphs anew on request, as it pauses on request",
        {"self.model_runner": "a worker extension's, with the model and its graphs"},
    ),
)
"""In the order in which a server meets them."""
