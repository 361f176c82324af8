# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Refuse features of vLLM that a server does not support, by topic; `derivable` refuses derived variants."""

from collections.abc import Iterator
from itertools import chain

from torch.nn import ModuleDict
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import VISION_ARCHITECTURES, MergedConfig
from flexquant.checkpoint.model_config import reads_more_than_text
from flexquant.checkpoint.module_names import HEAD, OF_TOKENS
from flexquant.checkpoint.schemes import rotates_in_blocks, rotates_in_passes
from flexquant.policy.routes import RouteTable
from flexquant.serving import draft_heads
from flexquant.serving.vllm_api import envs, is_breakable_cudagraph_enabled

SPECULATIVE_METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "dflash", "medusa", "mtp")
DRAFTS_FROM_TARGET = ("eagle", "eagle3", "dflash", "mtp")
"""Methods whose draft models can take embedding and lm_head from the model that they draft for."""
LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")
"""Load formats that hand a model the tensors of safetensors files by name, or need none."""

FOR_ADAPTERS = (
    "quantise without smoothing, by recipe 'fp8', 'rtn', or one of your own, or merge the adapter into the "
    "16-bit model before it is quantised"
)
"""What to do for variants that adapters do not fit."""
WITHOUT_IT = "choose a policy without it"


def refusals(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    """Yield a sentence for each requested feature that is not supported, with what to do instead."""
    topics = (_of_model, _of_nesting, _of_vision, _of_adapters, _of_ranks, _of_speculation, _of_passes)
    return chain.from_iterable(topic(vllm_config, merged, routes) for topic in topics)


def _of_model(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    model = vllm_config.model_config
    if any(hasattr(ModuleDict(), name) for name in (*merged.variants, *routes.derived)):
        what = f"variants named like an attribute of torch.nn.ModuleDict, among {', '.join(merged.variants)}"
        yield f"{what} (merge them under other names)"
    if reads_more_than_text(model.hf_config.to_dict()) and not model.is_multimodal_model:
        served = f"of such models it serves {', '.join(VISION_ARCHITECTURES)}"
        what = f"{merged.base_architecture}, which reads more than text"
        yield f"{what} ({served}; serve one variant's own checkpoint)"
    if model.runner_type != "generate":
        yield f"the '{model.runner_type}' runner (use --runner generate)"
    # A worker that drafts with heads has LOAD_FORMAT, once the model is built.
    if (load_format := vllm_config.load_config.load_format) not in (*LOAD_FORMATS, draft_heads.LOAD_FORMAT):
        what = f"load format '{load_format}', which does not read safetensors by their names"
        yield f"{what} (drop --load-format, or use {', '.join(LOAD_FORMATS)})"
    if model.enable_prompt_embeds and not has_one_embedding(merged, routes):
        yield "prompt embeddings for variants with different embeddings (drop --enable-prompt-embeds)"
    offload = vllm_config.offload_config
    if offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0:
        yield "prefetching offload, which takes one model (use --cpu-offload-gb)"
    if vllm_config.weight_transfer_config is not None:
        yield (
            "weights that change while it serves, which vLLM hands to one model and not to several variants "
            "(drop --weight-transfer-config; quantise and merge the new weights, and start a server on them)"
        )


def _of_nesting(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    ours = [name for name in routes.nested if name in routes.layers]
    has_capability = current_platform.has_device_capability
    is_ampere_to_hopper = current_platform.is_cuda() and has_capability(80) and not has_capability(100)
    if ours and not (current_platform.is_cpu() or is_ampere_to_hopper):
        what = f"'{ours[0]}', which is nested in '{routes.nested[ours[0]]}' and multiplies in INT8, on a"
        yield f"{what} device that is neither a CPU nor an NVIDIA GPU from Ampere to Hopper ({WITHOUT_IT})"
    model = vllm_config.model_config
    served, stated = (str(of.dtype).removeprefix("torch.") for of in (model, model.hf_config))
    if ours and served != stated:
        what = f"'{ours[0]}', whose weights are computed from INT4 scales in {stated}, in {served}"
        yield f"{what} (drop --dtype, or merge with --dtype {served})"


def _of_vision(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    model = vllm_config.model_config
    if model.multimodal_config is not None and model.multimodal_config.mm_encoder_only:
        yield "a server that only reads images (drop --mm-encoder-only)"
    if not model.is_multimodal_model:
        return
    if not has_one_embedding(merged, routes):
        what = "a vision model whose variants have different embeddings, which vLLM asks for before the plan"
        yield f"{what} of a pass is known (leave the embedding out of quantising in every variant)"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding for vision models (drop --speculative-config)"
    if vllm_config.lora_config is not None:
        yield "LoRA for vision models (drop --enable-lora)"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield "pipeline parallelism for vision models (use --tensor-parallel-size)"


def _of_adapters(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    if vllm_config.lora_config is not None and vllm_config.model_config.has_inner_state:
        yield "LoRA for models with layers that keep a state (merge the adapter into the 16-bit model)"
    sources = {routes.source(variant) for plan in routes.plans for variant in plan.variants}
    rescaled, as_first = sorted(sources & set(merged.rescaled)), sorted(sources - set(merged.rescaled))
    if vllm_config.lora_config is None or len(sources) == 1 or not rescaled:
        return
    why = "SmoothQuant, AWQ and rotations do so"
    if as_first:
        what = "LoRA for variants whose layers take scaled inputs beside others that take them as they are"
        what += f" ({', '.join(rescaled)} against {', '.join(as_first)}; {why}): an adapter does not fit both"
        yield f"{what} ({FOR_ADAPTERS})"
    else:
        what = f"LoRA for several variants whose layers take scaled inputs ({', '.join(rescaled)}; {why})"
        yield f"{what}: it does not know whether what fits one of them would fit each other ({FOR_ADAPTERS})"


def _of_ranks(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if parallel.use_ubatching:
        yield "microbatches (drop --enable-dbo and --ubatch-size)"
    if parallel.prefill_context_parallel_size > 1:
        yield "prefill context parallelism, whose ranks see unlike passes (use --tensor-parallel-size)"
    sources = sorted({routes.source(variant) for variant in routes.layers})
    rotated = [name for name in sources if rotates_in_passes(merged.variants[name].quantization_config)]
    whole = [n for n in rotated if not rotates_in_blocks(merged.variants[n].quantization_config)]
    if whole and parallel.tensor_parallel_size > 1:
        yield (
            f"'{whole[0]}', which rotates outputs, or all inputs of a linear at once, under tensor "
            "parallelism, where a rank has a part of them (rotate inputs in blocks, as the recipe 'default' "
            "does, drop --tensor-parallel-size, or choose a policy without it)"
        )
    if rotated and vllm_config.offload_config.uva.cpu_offload_gb > 0:
        yield (
            f"'{rotated[0]}', whose linears' inputs are rotated in each pass, with weights on the host, to "
            "which vLLM moves no rotations (drop --cpu-offload-gb, choose a policy without it, or build by "
            "the recipe 'unrotated')"
        )
    if parallel.enable_eplb:
        yield "moving experts among ranks (drop --enable-eplb): vLLM would move those of one variant"
    if vllm_config.model_config.is_moe and parallel.data_parallel_size > 1 and len(routes.plans) > 1:
        what = "data parallelism for a mixture-of-experts model, whose replicas run expert layers together"
        yield f"{what}, under a policy with several plans (use --tensor-parallel-size, or several servers)"


def _of_speculation(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    if vllm_config.speculative_config is None:
        return
    method = vllm_config.speculative_config.method
    if method not in SPECULATIVE_METHODS:
        what = f"speculative method '{method}' (use {', '.join(SPECULATIVE_METHODS)} or none)"
        yield f"{what}: others read states that few target classes have, or are not known to work"
    has_no_heads = draft_heads.drafts_with_own_heads(vllm_config) and merged.draft_heads is None
    if has_no_heads or draft_heads.drafts_with_other_merged(vllm_config):
        yield draft_heads.MERGED_DRAFTS
    if method == draft_heads.METHOD and getattr(vllm_config.model_config, "model_weights", None):
        yield "heads that draft out of object storage (serve a folder)"
    has_one_of_each = has_one_head(merged, routes) and has_one_embedding(merged, routes)
    if method in DRAFTS_FROM_TARGET and not has_one_of_each:
        what = f"speculative method '{method}' for variants with different embeddings or lm_heads"
        yield f"{what}, of which the draft model shares one (use 'draft_model' or 'ngram')"


def _of_passes(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    if envs.VLLM_BATCH_INVARIANT and len(routes.plans) > 1:
        what = "VLLM_BATCH_INVARIANT=1 under a policy with several plans, among which the other requests of a"
        one = f"choose a policy that uses one variant throughout, of {', '.join(routes.layers)}"
        yield f"{what} pass decide ({one}, or one that tells layers alone apart)"
    compilation = vllm_config.compilation_config
    graphs = compilation.cudagraph_mode or CUDAGraphMode.NONE
    if compilation.mode == CompilationMode.STOCK_TORCH_COMPILE:
        yield "compilation mode STOCK_TORCH_COMPILE, which would freeze one route (use VLLM_COMPILE or NONE)"
    if graphs == CUDAGraphMode.FULL and not routes.ignores_phase():
        what = "cudagraph_mode FULL, which replays one graph a size for all phases"
        yield f"{what}, under a policy that tells phases apart (use FULL_AND_PIECEWISE)"
    several = sum(map(len, routes.layers.values())) > len(routes.plans[0].layers)
    if is_breakable_cudagraph_enabled() and graphs.has_piecewise_cudagraphs() and several:
        what = "breakable CUDA graphs, which replay what was captured, whatever the plan"
        yield f"{what}, under a policy that loads several variants (set VLLM_USE_BREAKABLE_CUDAGRAPH=0)"
    if graphs.has_full_cudagraphs() and not has_one_head(merged, routes):
        yield f"cudagraph_mode {graphs.name} for variants with different lm_heads (use PIECEWISE)"
    model = vllm_config.model_config
    dtype = getattr(model, "head_dtype", model.dtype)  # vLLM 0.26 has it for poolers alone
    if routes.head == "int8" and dtype != model.dtype:
        what = f"an lm_head in INT8 that computes in {str(dtype).removeprefix('torch.')}, for which vLLM"
        advice = "drop 'head_dtype' from --hf-overrides, or have 'head: stored'"
        yield f"{what} takes 16-bit weights alone ({advice})"


def has_one_head(merged: MergedConfig, routes: RouteTable) -> bool:
    """Whether all plans use the same lm_head; a derived variant has that of its source."""
    sources = {routes.source(plan.layers[-1]) for plan in routes.plans}
    return len(sources) == 1 or any(map(HEAD.search, merged.shared_modules))


def has_one_embedding(merged: MergedConfig, routes: RouteTable) -> bool:
    """Whether all plans begin with the same embedding, that of the variant of their last layer."""
    sources = {routes.source(plan.layers[-1]) for plan in routes.plans}
    return len(sources) == 1 or any(m.rpartition(".")[2] in OF_TOKENS for m in merged.shared_modules)
