# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Refuse derived variants whose source or device does not allow them.

The front end asks before it starts workers, and a worker for what only it sees: its device and the scales.
"""

from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import StoredVariant
from flexquant.checkpoint.model_config import AWQ, GPTQ, JsonObject
from flexquant.checkpoint.module_names import is_for_heads
from flexquant.errors import FlexQuantError
from flexquant.policy.schema import Derivation

ONE_SCALE = "weights have one scale a channel, and INT8 activations need groups"


def check_derivable(derives: str, derivation: Derivation, source: StoredVariant) -> None:
    """Refuse a derived variant, which ``derives`` names, without its weights or a kernel for them."""
    if derivation.is_one_copy:
        check_one_copy_device(derives, derivation.weights)
        if source.is_in_16_bit:
            return
    groups = source.quantization_config.get("config_groups", {}).values()
    groups = [group for group in groups if not is_for_heads(group.get("targets", ["Linear"]))]
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
            which = f"which is in the format of {method}, not of compressed-tensors"
            problems = [f"{which} ('flexquant convert')"]
        needed = "symmetric INT4 weights in groups (scheme W4A16 in the recipe, not W4A16_ASYM)"
    if any(problems):
        problem = f"{derives} from '{derivation.source}', {next(filter(None, problems))}"
        raise FlexQuantError(f"{problem}; derive it from a W4A16 variant with {needed}")
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
    """Return, as a relative clause, why no INT8 is computed from these INT4 weights; None if it is."""
    given = weights.get("actorder")
    try:
        order = QuantizationArgs.validate_actorder(given)
    except ValueError:
        return f"whose groups have an order that is not known (actorder {given!r})"
    is_reordered = order == ActivationOrdering.GROUP
    return "whose groups are ordered by activation (actorder 'group')" if is_reordered else None


def check_one_copy_device(what: str, weights: str) -> None:
    """Refuse ``weights`` (int8, fp8), which ``what`` asks for, on a device that has no such product."""
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
        why = "which vLLM's Marlin kernel takes for large ones beside INT8 activations"
        advice = "quantise with GPTQ or by rounding, or take such a variant's rules out of the policy"
        raise FlexQuantError(f"{owner} has scales below zero, as AutoRound makes them, {why}; {advice}")


def check_w4a8_device(activations: str) -> None:
    """Refuse INT4 weights with ``activations`` (int8, fp8) on a device for which vLLM has no kernel."""
    if current_platform.is_cuda():
        has_kernel = current_platform.is_device_capability_family(120)
        has_kernel |= any(map(current_platform.is_device_capability, (89, 90)))
        if activations == "fp8" and not has_kernel:
            problem = f"vLLM has no kernel for INT4 weights with fp8 activations on {_device()}"
            there_is = "only for compute capability 8.9, 9.0 and 12.x"
            raise FlexQuantError(f"{problem}, {there_is}; derive the variant with 'activations: int8'")
    elif not (current_platform.is_cpu() and activations == "int8"):
        problem = f"there is no kernel for INT4 weights with {activations} activations on {_device()}"
        raise FlexQuantError(f"{problem}; choose a policy without such a variant")


def _device() -> str:
    return "this CPU" if current_platform.is_cpu() else current_platform.get_device_name()
