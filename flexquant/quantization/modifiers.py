# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make llmcompressor's modifiers, and our own, from a resolved recipe."""

from __future__ import annotations

import torch
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.quantization.quantization import QuantizationMixin
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.observers import Observer

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.quantization.resolve import ResolvedVariant, quantization_groups
from flexquant.quantization.smoothing import SearchedSmoothQuant
from flexquant.quantization.vocabulary import split_mapping

FLOOR = 1e-6


def needs_calibration(variant: ResolvedVariant) -> bool:
    """Whether calibration rows are needed to make the variant."""
    if variant.recipe.scale_distillation is not None:
        return True
    return any(modifier.requires_calibration_data for modifier in build_modifiers(variant))


def build_modifiers(variant: ResolvedVariant, tokens: int = 0) -> list[Modifier]:
    """Return the modifiers in the order of use; ``tokens`` is the number of all calibration tokens.

    Raises FlexQuantError for arguments that llmcompressor refuses.
    """
    recipe = variant.recipe
    try:
        built = [_modifier(name, {**given}, variant, tokens) for name, given in recipe.modifiers.items()]
        _check_observers(built[-1])
    except ValueError as e:
        reason = " ".join(str(e).split())
        raise FlexQuantError(f"{recipe.place} is refused by llmcompressor ({reason})") from e
    return built


def _modifier(name: str, arguments: JsonObject, variant: ResolvedVariant, tokens: int) -> Modifier:
    """Return one modifier of a recipe, from its own ``arguments``; raise ValueError for refused ones."""
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
    for group in quantizer.resolved_config.config_groups.values():
        for arguments in (group.weights, group.input_activations):
            observer = None if arguments is None else arguments.observer
            if observer is not None and observer.replace("_", "-") not in Observer.registered_names():
                known = ", ".join(name.replace("-", "_") for name in Observer.registered_names())
                raise ValueError(f"'{observer}' is no observer; choose among {known}")


class TokenNormalizedGPTQ(GPTQModifier):
    """llmcompressor's GPTQ on inputs of equal norm; each row must begin at the beginning of a sequence.

    GPTQ weights the error of a linear by H = sum of x x^T over the calibration tokens. A few tokens have
    activations hundreds of times larger than all others ("massive activations"): in front of some down_proj
    of SmolLM2 the first token of each row makes up nearly all of the sum. H then describes that token
    alone, and damping, a share of H's mean diagonal, exceeds the contribution of all other tokens: for
    these, GPTQ in effect rounds to nearest. Dividing each x by its norm gives all tokens equal weight. But
    the first token is the "attention sink": every later token attends to it, so its error costs more, and
    it gets the weight of several tokens. benchmarks/results/quality-methods compares the methods.
    """

    first_token_weight: float = 1.0
    """Number of tokens that a row's first token counts for."""

    def calibrate_module(
        self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor
    ) -> None:
        """Add a linear's inputs ``args[0]``, [rows, tokens, in] or [tokens, in] of one row, to its Hessian.

        Experts get [tokens, in], as llmcompressor runs one row at a time and gives its tokens to every
        expert. Raises FlexQuantError for inputs of another shape, in which a row's first token cannot be
        found.
        """
        x = args[0].float()
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(FLOOR)
        if self.first_token_weight != 1:
            x = x.unsqueeze(0) if x.ndim == 2 else x
            if x.ndim != 3:
                raise FlexQuantError(
                    f"the inputs of {self._module_names.get(module, 'a linear')} have the shape "
                    f"{list(x.shape)}, expected [rows, tokens, in], so the first token of a row cannot be "
                    "found; remove first_token_weight from the recipe"
                )
            x[:, 0] *= self.first_token_weight**0.5
        super().calibrate_module(module, (x,), _output)
