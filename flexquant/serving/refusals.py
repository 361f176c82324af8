# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Refuse what a server does not support: features of vLLM, by topic, and derived variants.

The front end asks before it starts a worker. A worker asks again for what only it can see: the device that it
runs on, and the scales of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import VISION_ARCHITECTURES, MergedConfig, StoredVariant
from flexquant.checkpoint.model_config import AWQ, GPTQ, JsonObject, reads_more_than_text
from flexquant.checkpoint.module_names import HEAD
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable
from flexquant.policy.schema import Derivation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle", "eagle3")
DRAFTS_FROM_TARGET = ("eagle", "eagle3")
"""Methods whose draft models can take embedding and lm_head from the model that they draft for."""
LOAD_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "dummy",
)
"""Load formats that hand a model the tensors of safetensors files by name, or need none."""

FOR_ADAPTERS = (
    "quantise without smoothing, by recipe 'fp8', 'rtn', or one of your own, or merge the adapter into the "
    "16-bit model before it is quantised"
)
"""What to do for variants that adapters do not fit."""
ONE_SCALE = "weights have one scale a channel, and INT8 activations need groups"


def refusals(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    """Yield a sentence for each requested feature that is not supported, with what to do instead."""
    topics = (_of_model, _of_nesting, _of_vision, _of_adapters, _of_ranks, _of_speculation, _of_graphs)
    return chain.from_iterable(topic(vllm_config, merged, routes) for topic in topics)


def _of_model(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    from torch.nn import ModuleDict

    model = vllm_config.model_config
    if any(hasattr(ModuleDict, name) for name in merged.variants):
        yield (
            f"variants named like an attribute of torch.nn.ModuleDict, among {', '.join(merged.variants)} "
            "(merge them under other names)"
        )
    if reads_more_than_text(model.hf_config.to_dict()) and not model.is_multimodal_model:
        yield (
            f"{merged.base_architecture}, which reads more than text (of such models it serves "
            f"{', '.join(VISION_ARCHITECTURES)}; serve one variant's own checkpoint)"
        )
    if model.runner_type != "generate":
        yield f"the '{model.runner_type}' runner (use --runner generate)"
    if (load_format := vllm_config.load_config.load_format) not in LOAD_FORMATS:
        yield (
            f"load format '{load_format}', which does not read safetensors by their names (drop "
            f"--load-format, or use {', '.join(LOAD_FORMATS)})"
        )
    if model.enable_prompt_embeds and not has_one_embedding(merged, routes):
        yield "prompt embeddings for variants with different embeddings (drop --enable-prompt-embeds)"
    offload = vllm_config.offload_config
    if offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0:
        yield "prefetching offload, which takes one model (use --cpu-offload-gb)"


def _of_nesting(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    ours = [name for name in routes.nested if name in routes.layers]
    has_capability = current_platform.has_device_capability
    is_ampere_to_hopper = current_platform.is_cuda() and has_capability(80) and not has_capability(100)
    if ours and not (current_platform.is_cpu() or is_ampere_to_hopper):
        yield (
            f"'{ours[0]}', which is nested in '{routes.nested[ours[0]]}' and multiplies in INT8, on a device "
            "that is neither a CPU nor an NVIDIA GPU from Ampere to Hopper (choose a policy without it)"
        )
    model = vllm_config.model_config
    served, stated = (str(of.dtype).removeprefix("torch.") for of in (model, model.hf_config))
    if ours and served != stated:
        yield (
            f"'{ours[0]}', whose weights are computed from INT4 scales in {stated}, in {served} (drop "
            f"--dtype, or merge with --dtype {served})"
        )


def _of_vision(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    model = vllm_config.model_config
    if model.multimodal_config is not None and model.multimodal_config.mm_encoder_only:
        yield "a server that only reads images (drop --mm-encoder-only)"
    if not model.is_multimodal_model:
        return
    if not has_one_embedding(merged, routes):
        yield (
            "a vision model whose variants have different embeddings, which vLLM asks for before the plan of "
            "a pass is known (leave the embedding out of quantising in every variant)"
        )
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
        yield (
            "LoRA for variants whose layers take scaled inputs beside others that take them as they are "
            f"({', '.join(rescaled)} against {', '.join(as_first)}; {why}): an adapter does not fit both "
            f"({FOR_ADAPTERS})"
        )
    else:
        yield (
            f"LoRA for several variants whose layers take scaled inputs ({', '.join(rescaled)}; {why}): it "
            f"does not know whether what fits one of them would fit each other ({FOR_ADAPTERS})"
        )


def _of_ranks(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if parallel.use_ubatching:
        yield "microbatches (drop --enable-dbo and --ubatch-size)"
    if parallel.prefill_context_parallel_size > 1:
        yield "prefill context parallelism, whose ranks see unlike passes (use --tensor-parallel-size)"
    if parallel.enable_eplb:
        yield "moving experts among ranks (drop --enable-eplb): vLLM would move those of one variant"
    if vllm_config.model_config.is_moe and parallel.data_parallel_size > 1 and len(routes.plans) > 1:
        yield (
            "data parallelism for a mixture-of-experts model, whose replicas run expert layers together, "
            "under a policy with several plans (use --tensor-parallel-size, or several servers)"
        )


def _of_speculation(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    if vllm_config.speculative_config is None:
        return
    method = vllm_config.speculative_config.method
    if method not in SPECULATIVE_METHODS:
        yield (
            f"speculative method '{method}' (use {', '.join(SPECULATIVE_METHODS)} or none): others read "
            "their draft model from the target's checkpoint, or states that few target classes have"
        )
    has_one_of_each = has_one_head(merged, routes) and has_one_embedding(merged, routes)
    if method in DRAFTS_FROM_TARGET and not has_one_of_each:
        yield (
            f"speculative method '{method}' for variants with different embeddings or lm_heads, of which the "
            "draft model shares one (use 'draft_model' or 'ngram')"
        )


def _of_graphs(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> Iterator[str]:
    from vllm.config import CompilationMode, CUDAGraphMode

    from flexquant.serving.vllm_api import is_breakable_cudagraph_enabled

    compilation = vllm_config.compilation_config
    graphs = compilation.cudagraph_mode or CUDAGraphMode.NONE
    several_plans_a_size = not routes.ignores_phase()
    if compilation.mode == CompilationMode.STOCK_TORCH_COMPILE:
        yield "compilation mode STOCK_TORCH_COMPILE, which would freeze one route (use VLLM_COMPILE or NONE)"
    if graphs == CUDAGraphMode.FULL and several_plans_a_size:
        yield (
            "cudagraph_mode FULL, which replays one graph a size for all phases, under a policy that tells "
            "phases apart (use FULL_AND_PIECEWISE)"
        )
    if is_breakable_cudagraph_enabled() and graphs.has_piecewise_cudagraphs() and several_plans_a_size:
        yield (
            "breakable CUDA graphs, which replay one graph a size for all phases, under a policy that tells "
            "phases apart (set VLLM_USE_BREAKABLE_CUDAGRAPH=0)"
        )
    if graphs.has_full_cudagraphs() and not has_one_head(merged, routes):
        yield f"cudagraph_mode {graphs.name} for variants with different lm_heads (use PIECEWISE)"


def has_one_head(merged: MergedConfig, routes: RouteTable) -> bool:
    """Whether all plans use the same lm_head; a derived variant has its own if it may be quantised."""
    last = {plan.layers[-1] for plan in routes.plans}
    if len(last) == 1:
        return True
    sources = {routes.source(variant) for variant in last}
    if len(sources) > 1 and not any(map(HEAD.search, merged.shared_modules)):
        return False
    quantised = [config for s in sources if (config := merged.variants[s].quantization_config)]
    is_16_bit = all(any("lm_head" in name for name in config.get("ignore") or ()) for config in quantised)
    return is_16_bit or not last & routes.derived.keys()


def has_one_embedding(merged: MergedConfig, routes: RouteTable) -> bool:
    """Whether all plans begin with the same embedding.

    A plan's embedding comes from the variant of its last layer (`build_plan`).
    """
    sources = {routes.source(plan.layers[-1]) for plan in routes.plans}
    return len(sources) == 1 or any(module.endswith("embed_tokens") for module in merged.shared_modules)


def check_derivable(derives: str, derivation: Derivation, source: StoredVariant) -> None:
    """Refuse a derived variant if its source lacks the weights that it needs, or this device a kernel.

    ``derives`` opens the message: what in the policy derives the variant.
    """
    if derivation.is_one_copy:
        check_one_copy_device(derives, derivation.weights)
        if source.is_in_16_bit:
            return
    groups = source.quantization_config.get("config_groups", {}).values()
    weights = [group.get("weights") or {} for group in groups if not group.get("input_activations")]
    integers = [w for w in weights if w.get("type", "int") == "int"]  # layers of other types do not change
    if derivation.is_one_copy:
        int4 = [w for w in integers if w.get("num_bits") == 4]
        problems = [*map(layer_problem, int4)] or ["which has no INT4 weights"]
        needed = "INT4 weights"
    else:
        problems = [group_problem(w, derivation.activations) for w in integers]
        problems = problems or ["which has no symmetric INT4 weights"]
        if (method := source.quantization_config.get("quant_method")) in (AWQ, GPTQ):  # vLLM keeps its kernel
            problems = [
                f"which is in the format of {method}, not of compressed-tensors ('flexquant convert')"
            ]
        needed = "symmetric INT4 weights in groups (scheme W4A16 in the recipe, not W4A16_ASYM)"
    if any(problems):
        raise FlexQuantError(
            f"{derives} from '{derivation.source}', {next(filter(None, problems))}; derive it from a W4A16 "
            f"variant with {needed}"
        )
    if derivation.is_one_copy:
        return
    check_w4a8_device(derivation.activations)
    if source.negative_scales:
        check_signs(derivation.activations, f"variant '{derivation.source}'")


def group_problem(weights: JsonObject, activations: str) -> str | None:
    """Return, as a relative clause, why integer weights with 16-bit activations cannot have 8-bit ones.

    None if they can. ``weights``: of a group of the checkpoint's ``quantization_config``.
    """
    if weights.get("num_bits") != 4 or not weights.get("symmetric", True):
        return "some of whose weights are not symmetric INT4"
    if problem := layer_problem(weights):
        return f"{problem}, which 8-bit activations do not allow"
    if activations == "int8" and (weights.get("group_size") or -1) == -1:
        return f"whose {ONE_SCALE}"
    return None


def layer_problem(weights: JsonObject) -> str | None:
    """Return, as a relative clause, why INT4 weights cannot be computed with in INT8; None if they can.

    ``weights``: of a group of the checkpoint's ``quantization_config``.
    """
    given = weights.get("actorder")
    try:
        order = QuantizationArgs.validate_actorder(given)
    except ValueError:
        return f"whose groups have an order that is not known (actorder {given!r})"
    return (
        "whose groups are ordered by activation (actorder 'group')"
        if order == ActivationOrdering.GROUP
        else None
    )


def check_one_copy_device(what: str, weights: str) -> None:
    """Raise :class:`FlexQuantError` on a device for which there is no such product; ``what`` asks for it.

    ``weights``: int8 or fp8.
    """
    oldest, named = (89, "Ada") if weights == "fp8" else (80, "Ampere")
    if current_platform.is_cpu():
        problem = "which is for GPUs" if weights == "fp8" else None
    elif not current_platform.is_cuda():
        problem = f"which runs on {'' if weights == 'fp8' else 'CPUs and '}NVIDIA GPUs"
    else:
        is_older = not current_platform.has_device_capability(oldest)
        problem = f"and {current_platform.get_device_name()} is older than {named}" if is_older else None
    if problem:
        raise FlexQuantError(f"{what} with 'weights: {weights}', {problem}; choose a policy without it")


def check_signs(activations: str, owner: str) -> None:
    """Refuse scales below zero, which ``owner`` has, where the kernel does not multiply right with them."""
    if current_platform.is_cuda() and activations == "int8":
        raise FlexQuantError(
            f"{owner} has scales below zero, as AutoRound makes them, which vLLM's Marlin kernel takes for "
            "large ones beside INT8 activations; quantise with GPTQ or by rounding, or take such a variant's "
            "rules out of the policy"
        )


def check_w4a8_device(activations: str) -> None:
    """Refuse INT4 weights with ``activations`` (int8, fp8) on a device for which vLLM has no kernel."""
    if current_platform.is_cuda():
        capabilities = map(current_platform.is_device_capability, (89, 90))
        if activations == "fp8" and not (
            any(capabilities) or current_platform.is_device_capability_family(120)
        ):
            raise FlexQuantError(
                f"vLLM has no kernel for INT4 weights with fp8 activations on {_device()}, only for compute "
                "capability 8.9, 9.0 and 12.x; derive the variant with 'activations: int8'"
            )
    elif not (current_platform.is_cpu() and activations == "int8"):
        raise FlexQuantError(
            f"there is no kernel for INT4 weights with {activations} activations on {_device()}; choose a "
            "policy without such a variant"
        )


def _device() -> str:
    return "this CPU" if current_platform.is_cpu() else current_platform.get_device_name()
