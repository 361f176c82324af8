# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make llmcompressor's modifiers, and our own, from a resolved recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.quantization.resolve import ResolvedVariant
from flexquant.quantization.schemes import preset_scheme, quantization_groups
from flexquant.quantization.vocabulary import split_mapping

if TYPE_CHECKING:
    import torch
    from llmcompressor.modifiers import Modifier
    from llmcompressor.modifiers.quantization.quantization import QuantizationMixin


def build_modifiers(
    variant: ResolvedVariant, rows: Sequence[torch.Tensor] = (), tokens: int = 0
) -> tuple[list[Modifier], bool]:
    """Return the modifiers in the order of use, and whether they need calibration data.

    ``rows`` are the calibration rows [tokens]. Raises FlexQuantError for arguments that llmcompressor
    refuses.
    """
    from flexquant.quantization.sensitivity import SpareSensitiveLayers

    recipe = variant.recipe
    try:
        built = [_modifier(name, {**given}, variant, tokens) for name, given in recipe.modifiers.items()]
        _check_observers(built[-1])
    except ValueError as e:
        reason = " ".join(str(e).split())
        raise FlexQuantError(f"{recipe.place} is refused by llmcompressor ({reason})") from e
    needs_data = any(modifier.requires_calibration_data for modifier in built)
    needs_data |= recipe.scale_distillation is not None
    if recipe.sensitive_layers is not None:
        preset = recipe.sensitive_layers.scheme
        scheme = None if preset is None else preset_scheme(preset, ["Linear"], variant.group_size)
        budget = recipe.sensitive_layers.budget
        search = SpareSensitiveLayers(rows=rows, budget=budget, scheme=scheme, quantizer=built[-1])
        built.insert(len(built) - 1, search)
        needs_data = True
    return built, needs_data


def _modifier(name: str, arguments: JsonObject, variant: ResolvedVariant, tokens: int) -> Modifier:
    """Return one modifier of a recipe, from its own ``arguments``; raise ValueError for refused ones."""
    import torch
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    from flexquant.quantization.gptq import TokenNormalizedGPTQ
    from flexquant.quantization.smoothing import SearchedSmoothQuant

    if name == "SmoothQuantModifier":
        strength = arguments.pop("smoothing_strength")
        if isinstance(strength, list):
            return SearchedSmoothQuant(candidates=strength, tokens=tokens, **arguments)
        fixed = strength if isinstance(strength, dict) else dict.fromkeys(variant.smoothed, strength)
        return SearchedSmoothQuant(fixed=fixed, tokens=tokens, **arguments)
    if name == "AWQModifier":
        pairs = [pair for m in arguments.pop("mappings") if (pair := split_mapping(m))]
        return AWQModifier(mappings=[AWQMapping(smooth, balance) for balance, smooth in pairs], **arguments)
    groups = quantization_groups(arguments)
    in_groups = ("scheme", "targets", "group_size", "config_groups")
    kept = {"ignore": [], **{key: value for key, value in arguments.items() if key not in in_groups}}
    if name == "AutoRoundModifier":
        # Importing it takes seconds. Compiling only pays on GPUs.
        from llmcompressor.modifiers.autoround import AutoRoundModifier

        on_gpu = torch.accelerator.is_available()
        return AutoRoundModifier(config_groups=groups, enable_torch_compile=on_gpu, **kept)
    quantizer = {"GPTQModifier": GPTQModifier, "QuantizationModifier": QuantizationModifier}[name]
    if "first_token_weight" in kept:
        quantizer = TokenNormalizedGPTQ
    return quantizer(config_groups=groups, **kept)


def _check_observers(quantizer: QuantizationMixin) -> None:
    """Raise ValueError for an observer that llmcompressor does not have."""
    from llmcompressor.observers import Observer

    for group in quantizer.resolved_config.config_groups.values():
        for arguments in (group.weights, group.input_activations):
            observer = None if arguments is None else arguments.observer
            if observer is not None and observer.replace("_", "-") not in Observer.registered_names():
                known = ", ".join(name.replace("-", "_") for name in Observer.registered_names())
                raise ValueError(f"'{observer}' is no observer; choose among {known}")
