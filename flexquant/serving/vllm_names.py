# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""List every name of vLLM that FlexQuant uses; this is the file to open for a new version of vLLM.

:data:`PUBLIC` names, which vLLM documents for users and plugins, are imported from vLLM wherever they are
needed. Every other name of vLLM is listed in :data:`NAMES` and imported from
:mod:`flexquant.serving.vllm_api`, which looks it up here. The benchmarks, which are not part of the package,
import names from vLLM itself, but these are listed too. Tests enforce this.

``make check-vllm VERSION=...`` compares the tables with the source of any published vLLM, without installing
it; ``VLLM_VERSIONS.md`` beside this file is its answer for the supported ones. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Names:
    """Names from one module of vLLM that become unnecessary together, each with its purpose.

    ``Name`` is imported; ``Class.attribute`` is accessed. Parentheses hold the parameters that FlexQuant
    passes, those before ``*`` by position, those after it by keyword.
    """

    module: str
    goes_when: str
    """Change in vLLM or in FlexQuant after which the names are not needed any more."""
    uses: Mapping[str, str] = field(default_factory=dict)
    """Names that FlexQuant imports, reads, sets or calls."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Methods that FlexQuant's subclasses define, all abstract ones included, with vLLM's parameters."""
    mentions: Mapping[str, str] = field(default_factory=dict)
    """Attributes of any object, environment variables and operators that occur in the module's code."""
    since: tuple[int, int] | None = None
    """First minor version that has them, None: the oldest; FlexQuant needs none of them before."""
    until: tuple[int, int] | None = None
    """Last minor version that has them, None: the newest; FlexQuant needs none of them after."""


PUBLIC: dict[str, tuple[str, ...]] = {
    "vllm": ("EngineArgs", "LLM", "RequestOutput", "SamplingParams"),
    "vllm.config": ("CompilationMode", "CUDAGraphMode", "ModelConfig", "VllmConfig"),
    "vllm.logger": ("init_logger",),
    "vllm.model_executor.models": ("ModelRegistry",),
    "vllm.platforms": ("PlatformEnum", "current_platform"),
}
"""Module of vLLM -> names that may be imported from it anywhere."""

_KERNELS = "vllm.model_executor.kernels.linear"
_QUANTIZATION = "vllm.model_executor.layers.quantization"

_PART_OF_VLLM = "FlexQuant is a part of vLLM"
_TWO_MODELS = "vLLM builds a second model over the attention layers of a first"
_PLANS = "vLLM compiles several instances of one model class apart by itself"
_PIECEWISE = "vLLM calls a model once for every PIECEWISE graph of every plan"
_RECAPTURE = "vLLM captures graphs anew on request, as it pauses on request"
_SPANS = "vLLM asks plugins for attributes of the span of a request"
_PHASE = "the forward context tells the phase of a pass and its number of sequences"
_W4A8 = "vLLM takes the activations of W4A8 from the model's config, not from the process"
_CPU_KERNELS = "vLLM's own kernels are right on every CPU (see serving/cpu/kernels.py)"
_CHOSEN = "vLLM chooses a CPU kernel by the number of tokens, and W4A8 by the layer"
_MEASURING = "vLLM times single passes on request, and frees an engine's memory on leaving it"
_DOCTOR = "vLLM says without a start which kernels and how much memory a model will have"
_BENCHMARKS = "the benchmark goes"

NAMES = (
    # In every process of vLLM: registration, and what can be refused early.
    Names(
        _QUANTIZATION,
        _PART_OF_VLLM,
        {
            "QUANTIZATION_METHODS": "read: whether this process has registered FlexQuant already",
            "register_quantization_config(quantization)": "makes 'flexquant' a quantisation method",
        },
    ),
    Names(
        f"{_QUANTIZATION}.base_config",
        _PART_OF_VLLM,
        {
            "QuantizationConfig.__init__()": "base class of a merged checkpoint's quantisation config",
            "QuantizeMethodBase.process_weights_after_loading(layer)": "a return type; a benchmark calls it",
            "QuantizeMethodBase.create_weights(layer)": "called without memory for layers that no plan takes",
        },
        overrides={
            "QuantizationConfig.get_name()": "'flexquant'",
            "QuantizationConfig.get_supported_act_dtypes()": "the 16-bit types and fp32",
            "QuantizationConfig.get_min_capability()": "0; each variant's own config is asked again",
            "QuantizationConfig.get_config_filenames()": "none; the section is in config.json",
            "QuantizationConfig.from_config(config)": "reads the section",
            "QuantizationConfig.get_quant_method(layer, prefix)": "refuses; layers belong to variants",
        },
    ),
    Names(
        "vllm.model_executor.models.config",
        "plugins may register such a hook",
        {"MODELS_CONFIG_MAP": "written: FlexQuant's hook in the front-end process; read: the base model's"},
        overrides={
            "VerifyAndUpdateConfig.verify_and_update_config(vllm_config)": "refuses what cannot be served"
        },
    ),
    Names(
        "vllm.model_executor.models.registry",
        _PART_OF_VLLM,
        {
            "_ModelRegistry.is_pp_supported_model(architectures, model_config)": "asked about the base model",
            "_ModelRegistry.register_model(model_arch, model_cls)": "ModelRegistry's: the model class",
            "_ModelRegistry.resolve_model_cls(architectures, *, model_config)": "the base model's class",
        },
    ),
    Names(
        "vllm.config",
        _PART_OF_VLLM,
        {
            "VllmConfig.additional_config": "FlexQuant's options; a plan's name, which keeps its cache apart",
            "VllmConfig.compilation_config": "as below",
            "VllmConfig.get_quantization_config(model_config, load_config)": "a variant's own config",
            "VllmConfig.load_config": "for a variant's own config",
            "VllmConfig.lora_config": "whether layers are made ready for adapters",
            "VllmConfig.offload_config": "one that prefetches is refused",
            "VllmConfig.model_config": "exchanged in each variant's copy",
            "VllmConfig.parallel_config": "as below",
            "VllmConfig.quant_config": "exchanged in each variant's copy",
            "VllmConfig.scheduler_config": "as below",
            "VllmConfig.speculative_config": "as below",
            "ModelConfig.enable_prompt_embeds": "refused for variants with different embeddings",
            "ModelConfig.get_vocab_size()": "random prompts, when passes are timed",
            "ModelConfig.hf_config": "the checkpoint's config.json; exchanged in each variant's copy",
            "ModelConfig.hf_text_config": "the number of layers",
            "ModelConfig.is_multimodal_model": "whether the model reads images",
            "ModelConfig.multimodal_config": "as below",
            "MultiModalConfig.mm_encoder_only": "refused",
            "ModelConfig.is_moe": "refused with data parallelism and several plans",
            "ModelConfig.registry": "asked whether the base model may be split among ranks",
            "ModelConfig.quantization": "exchanged in each variant's copy",
            "ModelConfig.runner_type": "all but 'generate' refused",
            "CompilationConfig.cudagraph_capture_sizes": "which passes are padded, and the last one captured",
            "CompilationConfig.cudagraph_mode": "modes that need more than one plan a graph are refused",
            "CompilationConfig.mode": "STOCK_TORCH_COMPILE is refused",
            "CUDAGraphMode.has_full_cudagraphs()": "modes that need more than one plan a graph are refused",
            "CUDAGraphMode.has_piecewise_cudagraphs()": "breakable graphs are refused",
            "ParallelConfig.data_parallel_index": "each replica writes a trace of its own",
            "ParallelConfig.data_parallel_size": "refused for mixtures of experts under several plans",
            "ParallelConfig.enable_eplb": "refused",
            "ParallelConfig.pipeline_parallel_size": "each rank needs a decoder layer",
            "ParallelConfig.prefill_context_parallel_size": "more than 1 refused",
            "ParallelConfig.rank": "each worker writes a trace of its own",
            "ParallelConfig.use_ubatching": "refused",
            "SchedulerConfig.max_num_batched_tokens": "the route table's largest pass",
            "SchedulerConfig.max_num_seqs": "the route table's largest decode pass",
            "SpeculativeConfig.method": "some are refused",
            "SpeculativeConfig.num_speculative_tokens": "tokens a sequence contributes to a decode pass",
        },
    ),
    Names(
        "vllm.compilation.breakable_cudagraph",
        "breakable graphs hold several plans, or vLLM drops them",
        {"is_breakable_cudagraph_enabled()": "refused where a policy tells phases apart"},
    ),
    # In a worker, for every model: variants, plans, graphs.
    Names(
        "vllm.config",
        _TWO_MODELS,
        {
            "CompilationConfig.static_all_moe_layers": "names of expert layers in order; kept as it was",
            "CompilationConfig.static_forward_context": "layers by name; exchanged for a while",
        },
    ),
    Names(
        "vllm.config",
        _TWO_MODELS,
        {"ModelConfig.word_embeddings_untied_by_checkpoint": "whether to tie a variant's lm_head again"},
        since=(0, 29),
    ),
    Names(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        _TWO_MODELS,
        {"ParallelLMHead.tie_weights(embed_tokens)": "called where what it is tied to is another variant's"},
    ),
    Names(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner",
        _TWO_MODELS,
        {
            "MoERunner": "an expert layer, which registers by name as attention does",
            "MoERunner.layer_name": "set: each variant's layers get names of their own",
            "MoERunner.routed_experts": "what holds the experts' weights: shared where they are equal",
        },
    ),
    Names(
        "vllm.model_executor.layers.fused_moe.routed_experts",
        _TWO_MODELS,
        mentions={
            "moe_config": "number and size of the experts, for the bytes that they take",
            "quant_method": "tells the kernel of the experts",
        },
    ),
    Names(
        "vllm.model_executor.layers.fused_moe.config",
        _TWO_MODELS,
        {
            "FusedMoEConfig.hidden_dim": "of the layer's input",
            "FusedMoEConfig.intermediate_size_per_partition": "of each expert, on this rank",
            "FusedMoEConfig.is_act_and_mul": "whether an expert has a gate beside its up projection",
            "FusedMoEConfig.num_local_experts": "on this rank",
        },
    ),
    Names(
        "vllm.model_executor.layers.fused_moe",
        _TWO_MODELS,
        {"UnquantizedFusedMoEMethod": "experts in 16 bit, for logs"},
    ),
    Names(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        _TWO_MODELS,
        mentions={"experts_cls": "the kernel of the experts, for logs"},
    ),
    Names(
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16",
        "vLLM has experts with INT4 weights and 16-bit activations on CPUs",
        {"CompressedTensorsWNA16MoEMethod": "W4A16 experts: refused on CPUs, where they are W4A8"},
    ),
    Names(
        "vllm.model_executor.model_loader.utils",
        _TWO_MODELS,
        {"initialize_model(vllm_config, *, prefix, model_class)": "builds a variant"},
    ),
    Names(
        "vllm.model_executor.layers.attention_layer_base",
        _TWO_MODELS,
        {"AttentionLayerBase": "layers that register and may be shared by variants; others are refused"},
    ),
    Names(
        "vllm.compilation.wrapper",
        _PLANS,
        {"TorchCompileWithNoGuardsWrapper.__init__()": "called on a plan: compile state of its own"},
    ),
    Names(
        "vllm.envs",
        "vLLM loads what it has compiled ahead of time for a CPU",
        mentions={"VLLM_USE_AOT_COMPILE": "written: 0, so that Inductor keeps the code"},
    ),
    Names(
        "vllm.compilation.decorators",
        _PLANS,
        mentions={
            "compiled": "whether a model has been compiled; set anew on a plan",
            "do_not_compile": "whether a model will be compiled",
            "vllm_config": "the config a model is compiled under; a plan's differs in additional_config",
        },
    ),
    Names(
        "vllm.compilation.decorators",
        _PLANS,
        mentions={"_compile_tag": "names a plan's artefacts; set_model_tag does where it is not read"},
        since=(0, 32),
    ),
    Names(
        "vllm.compilation.backends",
        _PLANS,
        {"set_model_tag(tag)": "names a plan's folder in Inductor's cache"},
    ),
    Names(
        "vllm.config",
        _PLANS,
        {"set_current_vllm_config(vllm_config)": "compile state is set up under the plan's own config"},
    ),
    Names(
        "vllm.compilation.cuda_graph",
        _PIECEWISE,
        {
            "CUDAGraphWrapper._all_instances": "which wrappers a plan's compilation has made",
            "CUDAGraphWrapper.concrete_cudagraph_entries": "whether a wrapper holds a graph of a size",
            "CUDAGraphWrapper.runtime_mode": "FULL graphs go when another policy is taken",
        },
    ),
    Names(
        "vllm.v1.worker.gpu_model_runner",
        _RECAPTURE,
        {
            "GPUModelRunner.capture_model()": "captures what is missing of the graphs, or was dropped",
            "GPUModelRunner.cudagraph_dispatcher": "where no capture succeeds, for what follows",
        },
    ),
    Names(
        "vllm.v1.cudagraph_dispatcher",
        _RECAPTURE,
        {"CudagraphDispatcher.keys_initialized": "set to False, so that no pass asks for a graph"},
    ),
    Names(
        "vllm.v1.worker.gpu.model_runner",
        _RECAPTURE,
        {"GPUModelRunner.capture_model()": "the same, by the V2 runner"},
        mentions={"self.cudagraph_manager": "which runner it is, and the graphs that follow"},
    ),
    Names(
        "vllm.v1.worker.gpu.cudagraph_utils",
        _RECAPTURE,
        {"CudaGraphManager._graphs_captured": "the same, of the V2 runner"},
        mentions={"self.graphs": "the V2 runner's FULL graphs, emptied before it captures again"},
    ),
    Names(
        "vllm.v1.worker.worker_base",
        _RECAPTURE,
        mentions={"self.model_runner": "a worker extension's, with the model and its graphs"},
    ),
    Names(
        "vllm.v1.engine.async_llm",
        _RECAPTURE,
        {
            "AsyncLLM.collective_rpc(method)": "tells the workers of all engines",
            "AsyncLLM.engine_core": "the client of the engines, for what follows",
            "AsyncLLM.is_paused()": "an operator's pause stays",
            "AsyncLLM.pause_generation(*, mode, clear_cache)": "no pass runs while graphs are captured",
            "AsyncLLM.resume_generation()": "serving goes on",
        },
    ),
    Names(
        "vllm.v1.engine.core_client",
        "AsyncLLM.collective_rpc returns the answers of all data-parallel engines",
        {
            "AsyncMPClient._call_utility_async(method, args, *, engine)": "asks and tells the workers of one",
            "MPClient.core_engines": "all of them",
        },
    ),
    Names(
        "vllm.v1.engine.async_llm",
        _SPANS,
        {"AsyncLLM.is_tracing_enabled()": "whether vLLM sends spans of requests anywhere"},
    ),
    Names(
        "vllm.tracing",
        _SPANS,
        {
            "SpanAttributes": "names of attributes of vLLM's spans",
            "SpanAttributes.GEN_AI_REQUEST_ID": "the attribute with the request's name",
        },
    ),
    Names(
        "vllm.v1.engine.output_processor",
        _SPANS,
        mentions={"SpanAttributes.GEN_AI_REQUEST_ID": "the span of a request has that attribute"},
    ),
    Names("vllm.compilation", _PIECEWISE, {"monitor": "a module that holds what follows"}),
    Names(
        "vllm.compilation.monitor",
        _PIECEWISE,
        {"cudagraph_capturing_enabled": "whether vLLM allows a capture: False once serving has begun"},
    ),
    Names(
        "vllm.forward_context",
        _PIECEWISE,
        {
            "BatchDescriptor": "the type of a graph's size",
            "override_forward_context(forward_context)": "a plan's run before its capture is not captured",
            "ForwardContext.batch_descriptor": "the size that is captured",
            "ForwardContext.cudagraph_runtime_mode": "whether a pass runs in pieces",
        },
    ),
    Names(
        "vllm.model_executor.layers.linear",
        "checkpoint headers are counted instead",
        {
            "LinearBase": "linear layers, to tell the size of a 16-bit copy",
            "LinearBase.input_size": "the size of one that every rank has whole",
            "LinearBase.output_size": "the size of one that every rank has whole",
        },
        mentions={
            "input_size_per_partition": "the size of a linear layer on this rank",
            "output_size_per_partition": "the size of a linear layer on this rank",
        },
    ),
    Names(
        "vllm._custom_ops",
        "vLLM tells how much memory its CPU kernels hold",
        {"CPUDNNLGEMMHandler": "a weight that oneDNN holds, whose size is that of the loaded one"},
    ),
    Names(
        "vllm.model_executor.layers.utils",
        "vLLM tells how much memory its CPU kernels hold",
        mentions={"layer.cpu_linear": "a function around a 16-bit weight that a CPU kernel has packed"},
    ),
    Names(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "vLLM packs no embedding that is only looked up",
        {
            "VocabParallelEmbedding": "embeddings, of which a CPU's kernels hold a copy",
            "ParallelLMHead": "those that logits are computed with",
        },
    ),
    Names(
        "vllm.model_executor.model_loader.default_loader",
        "vLLM asks every model which tensors it wants",
        mentions={"is_unused_checkpoint_weight": "shards that need not be opened; without it all are"},
        since=(0, 32),
    ),
    Names(
        "vllm.model_executor.model_loader.utils",
        "no supported base model defines the hook, and vLLM tells a model that its weights are packed",
        mentions={"model.process_weights_after_loading": "handed on to the variants; then bytes are counted"},
        since=(0, 27),
    ),
    Names(
        "vllm.sequence",
        _PART_OF_VLLM,
        {"IntermediateTensors": "what a pipeline-parallel rank takes and returns"},
    ),
    Names(
        "vllm.model_executor.models.interfaces",
        _PART_OF_VLLM,
        {
            "SupportsEagle": "base class of a model whose hidden states EAGLE drafts from",
            "SupportsEagle3": "the same for EAGLE-3; base models without it are refused",
            "SupportsEagle3.set_aux_hidden_state_layers(layers)": "handed on to every plan",
            "SupportsLoRA": "base class of a model whose layers vLLM may wrap for adapters",
            "SupportsMultiModal": "base class of a model that reads images",
            "SupportsMultiModal._processor_factory": "a base model's: it prepares images and prompts",
            "SupportsMultiModal.embed_multimodal()": "asked of a plan: the embeddings of images",
            "SupportsMultiModal.get_language_model()": "where a vision model has its decoder layers",
            "SupportsMultiModal.get_placeholder_str(modality, i)": "a base model's: what stands for an image",
            "SupportsPP": "base class of a model whose layers may lie on several ranks",
        },
        overrides={
            "SupportsMultiModal.embed_multimodal()": "asks a plan",
        },
        mentions={
            "multimodal_embeddings": "those of images, for the embeddings that a pass begins with",
            "is_multimodal": "where they go",
            "make_empty_intermediate_tensors": "taken from a variant",
            "embedding_modules": "none: adapters of linear layers alone",
            "hf_to_vllm_mapper": "a variant's, for adapters; maps the names of modules that are shared",
            "packed_modules_mapping": "taken from a variant",
            "supports_lora": "base models without it are refused",
        },
    ),
    Names(
        "vllm.model_executor.models.idefics3",
        "vLLM asks a model, not its class, how images are read",
        {"Idefics3ForConditionalGeneration": "the base model, which is asked"},
    ),
    Names(
        "vllm.model_executor.models.utils",
        _PART_OF_VLLM,
        {"WeightsMapper.apply_list(values)": "hf_to_vllm_mapper's: vLLM's names of modules that are shared"},
    ),
    Names(
        "vllm.lora.model_manager",
        "vLLM can be told which modules of a model stand for the same layer of an adapter",
        {
            "LoRAModelManager": "vLLM sets it as the model's lora_manager when all layers are wrapped",
        },
        mentions={
            "lora_manager": "set on the model",
            "modules": "layers of further variants are taken out",
        },
    ),
    Names(
        "vllm.lora.layers.base_linear",
        "as above",
        mentions={"lora_a_stacked": "shared by all variants", "lora_b_stacked": "shared by all variants"},
    ),
    Names(
        "vllm.distributed.parallel_state",
        _PART_OF_VLLM,
        {
            "get_world_group()": "all ranks, which have to agree on the policy",
            "GroupCoordinator.cpu_group": "how they tell each other",
            "GroupCoordinator.world_size": "how many they are",
            "GroupCoordinator.broadcast(input_)": "the first tensor-parallel rank tells the trigger's signal",
        },
    ),
    Names(
        "vllm.distributed.utils",
        _PART_OF_VLLM,
        {"get_pp_indices(num_hidden_layers, pp_rank, pp_size)": "a rank without layers is refused"},
    ),
    # In a worker, for every pass.
    Names(
        "vllm.forward_context",
        _PHASE,
        {
            "get_forward_context()": "what vLLM tells of the pass",
            "ForwardContext.attn_metadata": "the metadata of its attention layers, None in profiling runs",
        },
    ),
    Names(
        "vllm.v1.attention.backend",
        _PHASE,
        {
            "AttentionBackend.get_builder_cls()": "the builder to subclass",
            "AttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, fast_build)": (
                "overridden, to describe the pass; builders of some backends take more"
            ),
            "AttentionMetadataBuilder.build_for_cudagraph_capture(common_attn_metadata)": (
                "overridden, to tell captures"
            ),
            "AttentionMetadataBuilder.layer_names": "one builder of several counts a pass",
            "CommonAttentionMetadata.is_prefilling": "the first prompt ends vLLM's own passes",
            "CommonAttentionMetadata.num_actual_tokens": "the tokens of a pass, padded if it is replayed",
            "CommonAttentionMetadata.query_start_loc_cpu": "the tokens of each sequence, on the host",
            "subclass_attention_backend(name_prefix, attention_backend_cls, builder_cls)": "observes passes",
        },
    ),
    Names(
        "vllm.model_executor.layers.attention.attention",
        _PHASE,
        {"Attention.attn_backend": "exchanged for a subclass, before vLLM asks for it"},
    ),
    Names(
        "vllm.v1.worker.gpu.model_states.default",
        _PHASE,
        {"DefaultModelState.prepare_attn": "overridden, to tell vLLM's own requests by name"},
    ),
    Names(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid",
        _PHASE,
        {"MambaHybridModelState": "the same, for models that are part Mamba"},
    ),
    Names("vllm.v1.worker.gpu.input_batch", _PHASE, {"InputBatch.req_ids": "the names of a pass's requests"}),
    Names("vllm.v1.worker.gpu_input_batch", _PHASE, {"InputBatch.req_ids": "the same, of the V1 runner"}),
    Names("vllm.v1.worker.gpu_model_runner", _PHASE, mentions={"self.requests": "which have not ended"}),
    Names("vllm.v1.worker.gpu.model_runner", _PHASE, mentions={"self.req_states": "the same, of V2"}),
    Names("vllm.v1.worker.gpu.states", _PHASE, {"RequestState.req_id_to_index": "the names of these"}),
    Names(
        "vllm.v1.worker.gpu.model_states",
        _PHASE,
        mentions={"get_model_state_cls": "the V2 runner asks a model for that class"},
    ),
    # In a worker, for some schemes and devices: W4A8, and kernels for CPUs.
    Names(
        f"{_QUANTIZATION}.compressed_tensors.schemes",
        _W4A8,
        {"CompressedTensorsWNA16.kernel": "exchanged; in vLLM 0.33's batch-invariant mode there is none"},
    ),
    Names(
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors",
        _W4A8,
        mentions={"layer.scheme": "tells INT4 layers by their scheme"},
    ),
    Names(
        f"{_KERNELS}.mixed_precision.marlin",
        _W4A8,
        {
            "MarlinLinearKernel.__init__(c, w_q_param_name, w_s_param_name, w_zp_param_name)": "W4A8 on CUDA",
            "MarlinLinearKernel.can_implement(c)": "refuses layers that it cannot run",
        },
    ),
    Names(
        f"{_QUANTIZATION}.utils.marlin_utils",
        _W4A8,
        {"get__quant_fp8_method()": "builds what quantises to fp8, while vLLM's config is at hand"},
    ),
    Names("vllm.scalar_type", _W4A8, {"scalar_types.uint4b8": "symmetric INT4 weights"}),
    Names(
        f"{_KERNELS}.mixed_precision.MPLinearKernel",
        _W4A8,
        {
            "MPLinearLayerConfig.act_type": "the type of the activations, INT8 or fp8 for W4A8",
            "MPLinearLayerConfig.group_size": "checked",
            "MPLinearLayerConfig.partition_weight_shape": "checked; [in, out]",
            "MPLinearLayerConfig.weight_type": "checked",
            "MPLinearLayerConfig.zero_points": "refused",
            "MPLinearKernel.config": "such a config",
            "MPLinearKernel.w_q_name": "the parameter that holds the weights",
            "MPLinearKernel.w_s_name": "the parameter that holds their scales",
            "MPLinearKernel.w_zp_name": "the parameter that holds their zero points",
        },
    ),
    Names(
        f"{_KERNELS}.mixed_precision.MPLinearKernel",
        "0.29 is no longer supported",
        {"MPLinearLayerConfig.has_g_idx": "activation ordering by group, refused"},
        until=(0, 29),
    ),
    Names(
        f"{_KERNELS}.mixed_precision.MPLinearKernel",
        _CPU_KERNELS,
        {"MPLinearKernel._get_weight_params(layer)": "the parameters of those names"},
        overrides={
            "MPLinearKernel.get_min_capability()": "none; it is a CPU kernel",
            "MPLinearKernel.can_implement(c)": "symmetric groups of INT4",
            "MPLinearKernel.process_weights_after_loading(layer)": "lays the weights out for ATen",
            "MPLinearKernel.apply_weights(layer, x, bias)": "multiplies",
        },
    ),
    Names(
        f"{_KERNELS}.scaled_mm.cpu",
        _CPU_KERNELS,
        {
            "CPUInt8ScaledMMLinearKernel._get_layer_params(layer)": "the layer's parameters",
            "CPUInt8ScaledMMLinearKernel.config": "as below",
            "CPUInt8ScaledMMLinearKernel.layer_param_names": "their names",
            "CPUInt8ScaledMMLinearKernel.linear_method": "set: what vLLM's apply_weights calls",
        },
        overrides={
            "CPUInt8ScaledMMLinearKernel.apply_weights(layer, x, bias)": "takes two dimensions with AMX",
            "CPUInt8ScaledMMLinearKernel.process_weights_after_loading(layer)": "chooses the linear_method",
        },
    ),
    Names(
        f"{_KERNELS}.scaled_mm.ScaledMMLinearKernel",
        _CPU_KERNELS,
        {
            "Int8ScaledMMLinearLayerConfig.input_symmetric": "asymmetric activations are left to vLLM",
            "Int8ScaledMMLinearLayerConfig.is_channelwise": "whether scales are to be widened",
            "Int8ScaledMMLinearLayerConfig.is_static_input_scheme": "static activations are left to vLLM",
        },
    ),
    Names(
        _KERNELS,
        _CPU_KERNELS,
        {"register_linear_kernel(kernel_class, platform, kernel_type)": "offers FlexQuant's kernels"},
        mentions={
            "CPUInt8ScaledMMLinearKernel": "replaced, by name, in VLLM_DISABLED_KERNELS",
            "CPUWNA16LinearKernel": "replaced, by name, in VLLM_DISABLED_KERNELS",
        },
    ),
    Names(
        "vllm.envs",
        _CPU_KERNELS,
        mentions={"VLLM_DISABLED_KERNELS": "written: the kernels that FlexQuant's replace"},
    ),
    Names(
        "vllm.envs",
        _CHOSEN,
        mentions={
            "VLLM_CACHE_ROOT": "where the choice is kept",
            "VLLM_CPU_INT4_W4A8": "0 turns vLLM's W4A8 off",
        },
    ),
    Names(
        f"{_KERNELS}.mixed_precision.cpu",
        _CHOSEN,
        {"CPUWNA16LinearKernel.can_implement(c)": "the kernel for AVX512 and AMX, held to one precision"},
    ),
    Names(
        f"{_KERNELS}.mixed_precision.zentorch",
        _CHOSEN,
        {
            "ZentorchWNA16LinearKernel.apply_weights(layer, x, bias)": "AMD's kernel, held to one precision",
            "ZentorchWNA16LinearKernel.can_implement(c)": "refuses layers that it cannot run",
        },
    ),
    Names(
        f"{_KERNELS}.mixed_precision.zentorch",
        _CHOSEN,
        mentions={
            "_maybe_process_da8w4_weights": "whether this vLLM makes W4A8 of a layer",
            "_zentorch_da8w4": "whether it has",
        },
        since=(0, 31),
    ),
    Names(
        f"{_KERNELS}.scaled_mm.zentorch",
        _CHOSEN,
        {"ZentorchInt8ScaledMMLinearKernel": "AMD's W8A8"},
    ),
    Names("vllm", _CHOSEN, {"envs": "environment variables as vLLM reads them, as above"}),
    Names("vllm", _CPU_KERNELS, {"_custom_ops": "imported to load torch.ops._C, and for what follows"}),
    Names(
        "vllm._custom_ops",
        _CPU_KERNELS,
        {
            "create_onednn_scaled_mm(weight, weight_scales, output_type, dynamic_quant, use_azp, "
            "primitive_cache_size)": "tries whether INT8 sums are right on this CPU",
            "onednn_scaled_mm(dnnl_handler, x, output, input_scale, input_zp, input_zp_adj, bias)": "same",
            "onednn_scaled_int8_quant(input, scale, azp, symmetric)": "activations to INT8 per token",
        },
        mentions={"torch.ops._C.cpu_gemm_wna16": "missing from the AVX2 library, unlike its kernel"},
    ),
    Names(
        f"{_QUANTIZATION}.utils",
        _CPU_KERNELS,
        {"replace_parameter(mod, name, new)": "exchanges a weight for the one that was laid out"},
    ),
    Names(
        f"{_QUANTIZATION}.utils.quant_utils",
        _CPU_KERNELS,
        {"unpack_quantized_values_into_int32(w_q, wtype, *, packed_dim)": "INT4 weights, one an element"},
    ),
    Names(
        f"{_QUANTIZATION}.utils.w8a8_utils",
        _CPU_KERNELS,
        {"convert_to_channelwise(weight_scale, logical_widths)": "fused layers' INT8 scales"},
    ),
    # In processes that FlexQuant starts to measure and evaluate.
    Names(
        "vllm.entrypoints.llm",
        _MEASURING,
        {"LLM.llm_engine": "as below", "LLM.model_config": "the vocabulary's size"},
    ),
    Names(
        "vllm.v1.engine.llm_engine",
        _MEASURING,
        {
            "LLMEngine.abort_request(request_ids)": "ends decoding",
            "LLMEngine.add_request(request_id, prompt, params)": "a request of token ids",
            "LLMEngine.engine_core": "as below",
            "LLMEngine.has_unfinished_requests()": "whether a prefill has been answered",
            "LLMEngine.reset_prefix_cache()": "waits for the pass that is running",
            "LLMEngine.step()": "the outputs of a pass",
        },
    ),
    Names("vllm.v1.engine.core_client", _MEASURING, {"EngineCoreClient.shutdown()": "frees its memory"}),
    Names("vllm.distributed", _MEASURING, {"cleanup_dist_env_and_memory()": "frees an engine's memory"}),
    Names(
        "vllm.v1.sample.logits_processor",
        "vLLM scores a given continuation as it is decoded",
        overrides={
            "AdapterLogitsProcessor.is_argmax_invariant()": "False",
            "AdapterLogitsProcessor.new_req_logits_processor(params)": "what forces a request's answer",
        },
    ),
    Names(
        "vllm.envs",
        "vLLM's LLM has options for them",
        mentions={
            "VLLM_CPU_KVCACHE_SPACE": "written: less than nine tenths of the memory",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "written: evaluation makes the same batches every time",
            "VLLM_NO_USAGE_STATS": "written",
            "VLLM_USE_V2_MODEL_RUNNER": "written: evaluation's logits processor is the V1 runner's",
        },
    ),
    # In `flexquant doctor`.
    Names(
        "vllm.engine.arg_utils",
        _DOCTOR,
        {
            "EngineArgs.add_cli_args(parser)": "the arguments of `vllm serve`, but for the server's",
            "EngineArgs.create_engine_config(usage_context)": "what the front end makes of them",
            "EngineArgs.from_cli_args(args)": "the same",
        },
    ),
    Names(
        "vllm.model_executor.layers.rotary_embedding",
        _DOCTOR,
        {"_ROPE_DICT": "emptied and restored: what vLLM keeps for the next model of a process"},
    ),
    Names("vllm.usage.usage_lib", _DOCTOR, {"UsageContext.OPENAI_API_SERVER": "`vllm serve`'s defaults"}),
    Names(
        "vllm.distributed",
        _DOCTOR,
        {
            "init_distributed_environment(world_size, rank, distributed_init_method, local_rank, backend)": (
                "one rank, which layers ask for their share"
            ),
            "initialize_model_parallel(tensor_model_parallel_size)": "the same",
        },
    ),
    Names(
        "vllm.distributed.parallel_state",
        _DOCTOR,
        {
            "get_tp_group()": "set: how many ranks share a layer",
            "get_pp_group()": "set: how many ranks share the layers",
            "GroupCoordinator.ranks": "set",
        },
    ),
    Names(
        _KERNELS,
        _DOCTOR,
        {
            "_POSSIBLE_FP8_KERNELS": "read: the kernels of a device, the preferred ones first",
            "_POSSIBLE_INT8_KERNELS": "read: the same",
            "_POSSIBLE_KERNELS": "read: the same, for weights of 4 bits",
            "is_supported_and_can_implement_kernel(kernel, config, compute_capability)": "why not a kernel",
        },
    ),
    Names(
        f"{_KERNELS}.mixed_precision.MPLinearKernel",
        _DOCTOR,
        {
            "MPLinearKernel.can_implement(c)": "why a kernel is not taken",
            "MPLinearKernel.get_min_capability()": "the same",
        },
    ),
    Names(
        "vllm.config",
        _DOCTOR,
        {
            "VllmConfig.cache_config": "as below",
            "CacheConfig.gpu_memory_utilization": "what vLLM may take of the memory",
            "CacheConfig.kv_cache_memory_bytes": "what the user gives the KV cache",
            "ModelConfig.dtype": "what the model is built under",
            "ModelConfig.max_model_len": "the longest request",
            "ParallelConfig.tensor_parallel_size": "how many ranks share a layer",
        },
    ),
    Names(
        "vllm.model_executor.layers.attention_layer_base",
        _DOCTOR,
        {"AttentionLayerBase.get_kv_cache_spec(vllm_config)": "the bytes of a layer's KV cache"},
    ),
    Names(
        "vllm.v1.kv_cache_interface",
        _DOCTOR,
        {"KVCacheSpec.block_size": "tokens of a block", "KVCacheSpec.page_size_bytes": "bytes of a block"},
    ),
    # In the benchmarks.
    Names(
        "vllm.v1.worker.cpu_worker",
        _CPU_KERNELS,
        overrides={"CPUWorker.load_model(*, load_dummy_weights)": "stock vLLM gets FlexQuant's CPU kernels"},
    ),
    Names("vllm.entrypoints.cli.main", _BENCHMARKS, {"main()": "`vllm serve`, `vllm bench`"}),
    Names(
        "vllm.model_executor.model_loader",
        _BENCHMARKS,
        {"base_loader": "a module in which what builds a static model is exchanged, to choose its kernels"},
    ),
    Names(
        "vllm.benchmarks.serve",
        _BENCHMARKS,
        {"add_cli_args(parser)": "`vllm bench serve` in a process that stays", "main(args)": "the same"},
    ),
    Names(
        "vllm.utils.torch_utils",
        _BENCHMARKS,
        {"set_default_torch_dtype(dtype)": "layers keep the default dtype at their construction"},
    ),
    Names("vllm.utils.argparse_utils", _BENCHMARKS, {"FlexibleArgumentParser": "`vllm bench serve`"}),
    Names(
        "vllm.model_executor.layers.linear",
        _BENCHMARKS,
        {
            "ReplicatedLinear.__init__(input_size, output_size, *, bias, params_dtype, quant_config, prefix, "
            "return_bias, disable_tp)": "a layer that is timed",
            "ReplicatedLinear.quant_method": "lays its weights out",
        },
    ),
    Names(
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors",
        _BENCHMARKS,
        {"CompressedTensorsConfig.from_config(config)": "a timed layer's scheme"},
    ),
    Names(
        "vllm.distributed",
        _BENCHMARKS,
        {
            "init_distributed_environment(world_size, rank, distributed_init_method, local_rank, "
            "*, backend)": "what layers expect of a worker",
            "initialize_model_parallel(tensor_model_parallel_size)": "what layers expect of a worker",
        },
    ),
)
"""In the order in which a server meets them."""


def module_of(name: str) -> str | None:
    """Return the module that an imported name comes from, None for a name that is not listed."""
    for names in NAMES:
        for use in (*names.uses, *names.overrides):
            if use.partition("(")[0].partition(".")[0] == name:
                return names.module
    return None
