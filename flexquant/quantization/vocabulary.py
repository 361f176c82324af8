# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define what a recipe may hold: llmcompressor's modifiers, their arguments, and the allowed values.

The names are llmcompressor's, except ``group_size``, which its presets fix, and GPTQ's
``first_token_weight``, which selects :class:`flexquant.quantization.modifiers.TokenNormalizedGPTQ`. The list
is kept here, so that a recipe can be checked, line by line, before anything heavy is imported. Arguments that
would change the KV cache are left out, and refused with the reason (:mod:`flexquant.quantization.kv_safety`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeGuard

from pydantic import AfterValidator, Field, model_validator

from flexquant.documents.schema import Positive, Problem, Section, says
from flexquant.documents.yaml_document import show
from flexquant.quantization.kv_safety import SHARED_CACHE, check_mapping, check_targets

NAMED_MAPPINGS = ("norms", "norms-and-up")
"""Names of sets of mappings: from norms to the linears that read them; the same and up_proj to down_proj."""
NAMES = 'give a list of module names, classes or regular expressions such as "re:.*q_proj$"'


def _checked(check: Callable[[object], str | None]) -> AfterValidator:
    """Refuse a value for which ``check`` returns what it should be instead."""

    def validate(value: object) -> object:
        if problem := check(value):
            raise Problem(f"is {show(value)}; {problem}")
        return value

    return AfterValidator(validate)


def _are_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _targets(value: object) -> str | None:
    return check_targets(value) if _are_names(value) else NAMES


def _scheme(value: object) -> str | None:
    if isinstance(value, str) and value:
        return None
    if isinstance(value, dict) and value:
        return next((problem for targets in value.values() if (problem := _targets(targets))), None)
    return "give the name of a preset such as W8A8, or a mapping from presets to lists of targets"


def _config_groups(value: object) -> str | None:
    if not isinstance(value, dict) or not value or not all(isinstance(g, dict) for g in value.values()):
        return "give a mapping from names to groups with targets, weights and input_activations"
    for name, group in value.items():
        if group.get("output_activations") is not None:
            return (
                f"remove output_activations from {name}: rounded outputs of k_proj and v_proj {SHARED_CACHE}"
            )
        if problem := _targets(group.get("targets")):
            return f"correct the targets of {name}: {problem}"
    return None


def _actorder(value: object) -> str | None:
    return None if value in ("static", "weight", None) else "give one of static, weight, null"


def _mappings(value: object) -> str | None:
    if isinstance(value, str) and value in NAMED_MAPPINGS:
        return None
    if not isinstance(value, list) or not value:
        return f"give a list of mappings, or one of {', '.join(NAMED_MAPPINGS)}"
    for mapping in value:
        if (pair := split_mapping(mapping)) is None:
            return "give every mapping as [[linear, ...], module in front of them]"
        if problem := check_mapping(*pair):
            return problem
    return None


def split_mapping(mapping: object) -> tuple[list[str], str] | None:
    """Return the linears and the module in front of them, from either notation of llmcompressor."""
    if isinstance(mapping, dict) and set(mapping) == {"smooth_layer", "balance_layers"}:
        mapping = [mapping["balance_layers"], mapping["smooth_layer"]]
    if not isinstance(mapping, list) or len(mapping) != 2:
        return None
    balance, smooth = mapping
    if isinstance(smooth, list) and len(smooth) == 1:
        smooth = smooth[0]
    return (balance, smooth) if _are_names(balance) and isinstance(smooth, str) else None


Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Fraction = Annotated[Share, says("give a number from 0 to 1")]
AboveZero = Annotated[float, Field(strict=True, gt=0), says("give a number above 0")]
Name = Annotated[str, Field(strict=True, min_length=1), says("give text")]
Names = Annotated[list[Annotated[str, Field(strict=True)]], Field(min_length=1), says(NAMES, whole=True)]
Size = Annotated[int, Field(strict=True, ge=1)]
GroupSize = Annotated[
    Size | Annotated[list[Size], Field(min_length=1)],
    says("give a number of input features, or a list of which the first that fits is taken", whole=True),
]
Observers = Annotated[
    dict[Literal["weights", "input"], Name],
    Field(min_length=1),
    says("give a mapping such as {weights: memoryless_mse}, or use weight_observer", whole=True),
]
Strength = Annotated[
    Share
    | Annotated[list[Share], Field(min_length=1)]
    | Annotated[dict[str, Share | None], Field(min_length=1)],
    says(
        "give a number from 0 to 1, a list of them to search, or a mapping from the names of smooth "
        "modules to a number or null",
        whole=True,
    ),
]
Mappings = Annotated[object, _checked(_mappings)]


class Modifier(Section):
    """The arguments of one of llmcompressor's modifiers.

    A default here says no more than that the key may be left out; llmcompressor then takes its own.
    """

    refused = {
        "kv_cache_scheme": f"a variant's own scales for K and V {SHARED_CACHE}; set vLLM's --kv-cache-dtype",
        "output_activations": f"rounded outputs of k_proj and v_proj {SHARED_CACHE}; remove it",
        "output_observer": f"rounded outputs of k_proj and v_proj {SHARED_CACHE}; remove it",
    }


class SmoothQuant(Modifier):
    """SmoothQuant, whose strength may be searched."""

    smoothing_strength: Strength
    mappings: Mappings = None
    ignore: Names = []


class AWQ(Modifier):
    """AWQ's scaling of weights, which rounds nothing."""

    mappings: Mappings = None
    duo_scaling: Annotated[Literal[True, False, "both"], says("give one of true, false, both")] = True
    n_grid: Annotated[int, Field(strict=True, ge=4), says("give a whole number of at least 4")] = 20


class Quantizer(Modifier):
    """A modifier that quantises; a variant has exactly one."""

    targets: Annotated[object, _checked(_targets)] = None
    ignore: Names = []
    scheme: Annotated[object, _checked(_scheme)] = None
    config_groups: Annotated[object, _checked(_config_groups)] = None
    group_size: GroupSize = 1

    @model_validator(mode="after")
    def _check(self) -> Quantizer:
        given = self.model_fields_set
        if ("scheme" in given) == ("config_groups" in given):
            raise Problem("needs either 'scheme', such as W8A8 or W4A16, or 'config_groups'; give one")
        if "observer" in given and given & {"weight_observer", "input_observer"}:
            raise Problem("is given beside weight_observer or input_observer; remove one", ["observer"])
        return self


class Rounding(Quantizer):
    """Rounding to the nearest value, within ranges that observers choose."""

    weight_observer: Name = ""
    input_observer: Name = ""
    observer: Observers = {}


class GPTQ(Rounding):
    """GPTQ."""

    block_size: Positive = 128
    dampening_frac: Fraction = 0.01
    actorder: Annotated[object, _checked(_actorder)] = None
    first_token_weight: AboveZero = 1.0


class AutoRound(Quantizer):
    """AutoRound, which trains the rounding of each decoder layer."""

    iters: Positive = 200
    batch_size: Positive = 8
    lr: AboveZero = 1.0


TRANSFORMS: Mapping[str, type[Modifier]] = {"SmoothQuantModifier": SmoothQuant, "AWQModifier": AWQ}
"""Modifier that moves ranges between layers -> its arguments."""
QUANTIZERS: Mapping[str, type[Modifier]] = {
    "GPTQModifier": GPTQ,
    "QuantizationModifier": Rounding,
    "AutoRoundModifier": AutoRound,
}
"""Modifier that quantises -> its arguments."""
MODIFIERS: Mapping[str, type[Modifier]] = {**TRANSFORMS, **QUANTIZERS}

REFUSED = {
    **{
        name: f"it rotates heads and the residual stream, and rotated K and V {SHARED_CACHE}"
        for name in ("SpinQuantModifier", "QuIPModifier", "TransformModifier")
    },
    "sensitive_layers": "FlexQuant no longer searches for linears to spare, which gained less than zero "
    "points do; remove it, and take 'scheme: W4A16_ASYM', or name linears to keep in 16 bit in 'ignore'",
}
"""Keys of a variant that are refused -> the reason."""
