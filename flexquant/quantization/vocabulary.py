# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define what a recipe may hold: llmcompressor's modifiers, their arguments, and the allowed values.

The names are llmcompressor's, except ``group_size``, which its presets fix, and GPTQ's
``first_token_weight``, which selects :mod:`flexquant.quantization.gptq`. The list is kept here, so that a
recipe can be checked, line by line, before anything heavy is imported. Arguments that would change the KV
cache are left out, and refused with the reason (:mod:`flexquant.quantization.kv_safety`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard

from flexquant.quantization.kv_safety import SHARED_CACHE, check_mapping, check_targets

Check = Callable[[object], str | None]
"""Returns what a value should be instead, or None if it is right."""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(minimum: int) -> Check:
    def check(value: object) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return None
        return f"give a whole number of at least {minimum}"

    return check


def _fraction(value: object) -> str | None:
    return None if _is_number(value) and 0 <= value <= 1 else "give a number from 0 to 1"


def _positive(value: object) -> str | None:
    return None if _is_number(value) and value > 0 else "give a number above 0"


def _one_of(*allowed: object) -> Check:
    names = ", ".join("null" if value is None else str(value).lower() for value in allowed)
    return lambda value: None if any(value is a or value == a for a in allowed) else f"give one of {names}"


def _text(value: object) -> str | None:
    return None if isinstance(value, str) and value else "give text"


def _are_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _names(value: object) -> str | None:
    advice = 'give a list of module names, classes or regular expressions such as "re:.*q_proj$"'
    return None if _are_names(value) else advice


def _targets(value: object) -> str | None:
    return check_targets(value) if _are_names(value) else _names(value)


def _group_size(value: object) -> str | None:
    sizes = value if isinstance(value, list) else [value]
    if sizes and all(_whole(1)(size) is None for size in sizes):
        return None
    return "give a number of input features, or a list of which the first that fits is taken"


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


def _observers(value: object) -> str | None:
    if isinstance(value, dict) and value and set(value) <= {"weights", "input"}:
        return next((problem for name in value.values() if (problem := _text(name))), None)
    return "give a mapping such as {weights: memoryless_mse}, or use weight_observer"


def _smoothing_strength(value: object) -> str | None:
    if isinstance(value, dict):
        strengths, empty = [v for v in value.values() if v is not None], not value
    else:
        strengths = value if isinstance(value, list) else [value]
        empty = not strengths
    if empty or any(_fraction(strength) for strength in strengths):
        return (
            "give a number from 0 to 1, a list of them to search, or a mapping from the names of smooth "
            "modules to a number or null"
        )
    return None


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


NAMED_MAPPINGS = ("norms", "norms-and-up")
"""Names of sets of mappings: from norms to the linears that read them; the same and up_proj to down_proj."""


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


_SCHEMES: dict[str, Check] = {
    "targets": _targets,
    "ignore": _names,
    "scheme": _scheme,
    "config_groups": _config_groups,
    "group_size": _group_size,
}
_QUANTIZING: dict[str, Check] = {
    **_SCHEMES,
    "weight_observer": _text,
    "input_observer": _text,
    "observer": _observers,
}

TRANSFORMS: Mapping[str, Mapping[str, Check]] = {
    "SmoothQuantModifier": {
        "smoothing_strength": _smoothing_strength,
        "mappings": _mappings,
        "ignore": _names,
    },
    "AWQModifier": {
        "mappings": _mappings,
        "duo_scaling": _one_of(True, False, "both"),
        "n_grid": _whole(4),
    },
}
"""Modifier that moves ranges between layers -> its arguments with their checks."""

QUANTIZERS: Mapping[str, Mapping[str, Check]] = {
    "GPTQModifier": {
        **_QUANTIZING,
        "block_size": _whole(1),
        "dampening_frac": _fraction,
        "actorder": _one_of("static", "weight", None),
        "first_token_weight": _positive,
    },
    "QuantizationModifier": _QUANTIZING,
    "AutoRoundModifier": {**_SCHEMES, "iters": _whole(1), "batch_size": _whole(1), "lr": _positive},
}
"""Modifier that quantises -> its arguments with their checks; a variant has exactly one of these."""

MODIFIERS: Mapping[str, Mapping[str, Check]] = {**TRANSFORMS, **QUANTIZERS}

REFUSED_MODIFIERS = {
    name: f"it rotates heads and the residual stream, and rotated K and V {SHARED_CACHE}"
    for name in ("SpinQuantModifier", "QuIPModifier", "TransformModifier")
}
REFUSED_ARGUMENTS = {
    "kv_cache_scheme": f"a variant's own scales for K and V {SHARED_CACHE}; set vLLM's --kv-cache-dtype",
    "output_activations": f"rounded outputs of k_proj and v_proj {SHARED_CACHE}; remove it",
    "output_observer": f"rounded outputs of k_proj and v_proj {SHARED_CACHE}; remove it",
}
