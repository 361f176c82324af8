# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Resolve a recipe for a model: choose mappings, schemes and group sizes, check names, find the linears."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import EXPERTS, LATENT_UP, LAYER, fused_name
from flexquant.errors import FlexQuantError, said_by
from flexquant.quantization.recipe import VariantRecipe
from flexquant.quantization.source_model import ScaleMapping, default_mappings, gates, resolve_mappings
from flexquant.quantization.vocabulary import ROTATES, TRANSFORMS, split_mapping

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme
    from transformers import PreTrainedModel

LM_HEAD = "lm_head"
IN_EXPERTS = r"re:.*\.experts\..*"
"""Matches the matrices of a layer's routed experts, in a recipe."""


def in_layer(name: str) -> str:
    """Return a module's name below its decoder layer."""
    return LAYER.sub("", name)


@dataclass(frozen=True)
class ResolvedVariant:
    """A variant's recipe, with the choices made that depend on the model."""

    recipe: VariantRecipe
    linears: Collection[str]
    """Names of the quantised linears."""
    group_size: int | None
    """Input features that share one weight scale; None: one scale per channel or tensor, or several sizes."""
    smoothed: Sequence[str]
    """Names of the modules whose scales SmoothQuant may move."""
    notes: Sequence[str]
    """Sentences on what was left out of the recipe, and why."""


def resolve_variant(recipe: VariantRecipe, model: PreTrainedModel, model_type: str) -> ResolvedVariant:
    """Make the choices that depend on ``model``, which needs no weights, and check the recipe's names.

    Raises FlexQuantError, naming line and module, for schemes, groups and mappings that do not suit it.
    """
    try:
        modifiers, notes, smoothed = {}, [], []
        for name, given in recipe.modifiers.items():
            arguments = dict(given)
            if name in TRANSFORMS:
                mappings = _mappings(arguments.get("mappings"), model_type, model)
                arguments["mappings"] = [list(mapping) for mapping in mappings]
                if not mappings:
                    notes.append(f"without {name}, which norms feed which linears in {model_type} is unknown")
                    continue
                names = list(resolve_mappings(mappings, model, model_type))
                if name == "SmoothQuantModifier":
                    _check_strengths(arguments["smoothing_strength"], names)
                    smoothed = names
            modifiers[name] = arguments
        if (rotation := modifiers.get(ROTATES)) is not None:
            where_possible = rotation.pop("where_possible", False)
            try:
                rotation["transform_block_size"] = _block_size(rotation, model)
            except _NotRotated as e:
                if e.remedy and not where_possible:
                    raise
                notes.append(f"without {ROTATES}, which {e.why}")
                del modifiers[ROTATES]
        quantizer = modifiers[recipe.quantizer]
        if quantizer.pop("asymmetric_activations", False):
            quantizer = modifiers[recipe.quantizer] = with_asymmetric_activations(quantizer, model)
        groups = quantization_groups(quantizer)
        if left := _gates_left_out(groups, quantizer, model):
            quantizer["ignore"] = [*quantizer.get("ignore", []), *left]
            why = "gates, which only a recipe that names them quantises"
            notes.append(f"{', '.join(left)} left in 16 bit: {why}")
        if any(part.ndim == 3 for name, part in model.named_parameters() if EXPERTS.match(name)):
            quantizer["ignore"] = [*quantizer.get("ignore", []), IN_EXPERTS]
            notes.append("experts left in 16 bit: the model is published with all of a layer in one tensor")
        linears = _quantized_linears(groups, quantizer, model)
        head = _head_in_int8(model) if recipe.head == "int8" else []
        group_size = _group_size(quantizer, linears)
        if "group_size" in quantizer:
            quantizer["group_size"] = group_size
        if recipe.scale_distillation is not None:
            _check_distillable(linears)
    except FlexQuantError as e:
        raise FlexQuantError(f"{recipe.place}: {e}") from e
    recipe = replace(recipe, modifiers=modifiers)
    return ResolvedVariant(recipe, [*linears, *head], group_size, smoothed, notes)


def with_strengths(variant: ResolvedVariant, strengths: Mapping[str, float | None]) -> VariantRecipe:
    """Return the recipe with the ``strengths`` of smoothing that a search chose (None: not smoothed)."""
    name, modifiers = "SmoothQuantModifier", variant.recipe.modifiers
    chosen = {front: strengths.get(front) for front in variant.smoothed}
    smoothing = {**modifiers[name], "smoothing_strength": chosen}
    return replace(variant.recipe, modifiers={**modifiers, name: smoothing})


def _mappings(
    given: str | list[object] | None, model_type: str, model: PreTrainedModel
) -> list[ScaleMapping]:
    if isinstance(given, list):
        return [pair for mapping in given if (pair := split_mapping(mapping))]
    return default_mappings(model_type, given or "norms-and-up", [name for name, _ in model.named_modules()])


def _check_strengths(strengths: object, smoothed: Sequence[str]) -> None:
    if not isinstance(strengths, dict):
        return
    for name in strengths:
        if name not in smoothed:
            problem = f"smoothing_strength names '{name}', which no mapping smooths"
            raise FlexQuantError(f"{problem}; remove it, or use the model that the recipe was made for")
    for name in smoothed:
        if name not in strengths:
            problem = f"smoothing_strength lacks '{name}'"
            raise FlexQuantError(f"{problem}; add it with a number from 0 to 1, or null")


class _NotRotated(FlexQuantError):
    """Why a model does not have a rotation; with a ``remedy`` the recipe asked for what cannot be had."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(f"{ROTATES} {why}; {remedy}")
        self.why, self.remedy = why, remedy


def _block_size(arguments: JsonObject, model: PreTrainedModel) -> int:
    """Return the first of the given sizes whose blocks the inputs that are to be rotated consist of.

    Raises _NotRotated where inputs cannot be rotated, and, without a remedy, where all targets are ignored.
    """
    from compressed_tensors.utils import match_named_modules

    given = arguments["transform_block_size"]
    sizes = given if isinstance(given, list) else [given]
    found = dict(match_named_modules(model, arguments["targets"], arguments.get("ignore", ["lm_head"])))
    inputs = {name: getattr(module, "in_features", 0) for name, module in found.items()}
    if not found:
        if dict(match_named_modules(model, arguments["targets"])):
            raise _NotRotated("ignores all its targets in this model")
        raise _NotRotated("matches no linear of the model", "correct 'targets'")
    fused: dict[str, list[str]] = {}
    for name, _ in model.named_modules():
        fused.setdefault(fused_name(name), []).append(name)
    for name, module in found.items():
        if others := {*fused[fused_name(name)]} - {*found}:
            raise _NotRotated(
                f"would rotate the inputs of {name} and not of {min(others)}, and vLLM multiplies them at "
                "once",
                "give 'targets' that match both",
            )
        is_rotated = not (EXPERTS.match(f"{name}.") or LATENT_UP.match(f"{name}.") or name == "lm_head")
        if not is_rotated or getattr(module, "bias", None) is not None:
            raise _NotRotated(
                f"would rotate the inputs of {name}, which vLLM does not for experts, what expands a latent "
                "cache, an lm_head or a bias",
                "add its name to 'ignore'",
            )
    exact = arguments.get("transform_type") == "hadamard"
    fits = (s for s in sizes if all(n and n % s == 0 for n in inputs.values()) and not (exact and s & s - 1))
    if (size := next(fits, None)) is None:
        (name, *_) = [name for name, n in inputs.items() if not n or n % sizes[-1]] or inputs
        raise _NotRotated(
            f"cannot rotate the {inputs[name]} inputs of {name} in blocks of {' or '.join(map(str, sizes))}",
            "give a transform_block_size that is a power of two and divides them",
        )
    return size


def _gates_left_out(
    groups: Mapping[str, QuantizationScheme], arguments: JsonObject, model: PreTrainedModel
) -> list[str]:
    """Return what to ignore besides: `gates` that a class of modules, and no name, would quantise."""
    from compressed_tensors.utils import match_named_modules

    targets = [target for group in groups.values() for target in group.targets]
    named = [target for target in targets if target.startswith("re:") or "." in target]
    ignored = arguments.get("ignore", [])
    asked = {name for name, _ in match_named_modules(model, named, ignored)} if named else set()
    matched = {name for name, _ in match_named_modules(model, targets, ignored)}
    left = [name for name in gates(model) if name in matched - asked]
    kept = {in_layer(name) for name in matched - {*left}} | {name for name in left if in_layer(name) == name}
    patterns = {name: f"re:.*\\.{re.escape(in_layer(name))}$" for name in left}
    return list(dict.fromkeys(name if in_layer(name) in kept else patterns[name] for name in left))


def _quantized_linears(
    groups: Mapping[str, QuantizationScheme], arguments: JsonObject, model: PreTrainedModel
) -> dict[str, tuple[int, QuantizationScheme]]:
    """Return the input features and scheme of every linear that a quantising modifier quantises, by name."""
    import torch
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.utils import match_named_modules
    from compressed_tensors.utils.match import match_targets

    schemes = {target: group for group in groups.values() for target in group.targets}
    found = {}
    for name, module in match_named_modules(model, schemes, arguments.get("ignore", [])):
        if isinstance(module, torch.nn.Linear):
            scheme = schemes[match_targets(name, module, schemes)[0]]
            found[name] = (module.in_features, scheme)
            if infer_module_format(type(module), scheme) == "dense":
                kind = type(module).__name__
                raise FlexQuantError(f"{name}, a {kind}, would be stored uncompressed; add it to 'ignore'")
    if LM_HEAD in found:
        advice = f"add 'ignore: [{LM_HEAD}]', since many models share it with the embeddings"
        or_so = "'head: int8' beside the modifiers to have it in INT8"
        raise FlexQuantError(f"{LM_HEAD} would be quantised; {advice}, and {or_so}")
    if latent := next((name for name in found if LATENT_UP.match(f"{name}.")), None):
        why = "since the attention layer that holds it is one for all variants"
        raise FlexQuantError(f"{latent} would be quantised; add 're:.*kv_b_proj$' to 'ignore', {why}")
    if not found:
        raise FlexQuantError(f"no linear of the model matches {', '.join(schemes)}; correct 'targets'")
    return found


def _head_in_int8(model: PreTrainedModel) -> list[str]:
    """Return the name of the model's lm_head; raise FlexQuantError if it has none but the embedding."""
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        problem = f"the model's {LM_HEAD} is its embedding (tie_word_embeddings)"
        why = "beside which 'head: int8' would store a second matrix"
        advice = "serve with a policy that has 'head: int8', which rounds the one matrix at the start"
        raise FlexQuantError(f"{problem}, {why}; remove it, and {advice}")
    if not any(name == LM_HEAD for name, _ in model.named_modules()):
        raise FlexQuantError(f"the model has no '{LM_HEAD}' to store in INT8; remove 'head: int8'")
    return [LM_HEAD]


def _check_distillable(linears: Mapping[str, tuple[int, QuantizationScheme]]) -> None:
    for name, (_, scheme) in linears.items():
        weights = scheme.weights
        by_weight_alone = weights is not None and scheme.input_activations is None
        if not by_weight_alone or weights.type != "int" or weights.strategy not in ("group", "channel"):
            what = "scale_distillation trains scales of integer weights beside 16-bit activations"
            advice = "remove it, or choose a scheme such as W4A16"
            raise FlexQuantError(f"{what}, and {name} is quantised otherwise; {advice}")


def _group_size(arguments: JsonObject, linears: Mapping[str, tuple[int, QuantizationScheme]]) -> int | None:
    grouped = {name: features for name, (features, scheme) in linears.items() if _is_grouped(scheme)}
    given = arguments.get("group_size")
    if not grouped:
        if given is not None:
            raise FlexQuantError("group_size is given, but the scheme has no groups; remove it")
        return None
    if given is not None:
        return choose_group_size(grouped, given if isinstance(given, list) else [given])
    sizes = {
        choose_group_size({name: grouped[name]}, [scheme.weights.group_size])
        for name, (_, scheme) in linears.items()
        if name in grouped
    }
    return sizes.pop() if len(sizes) == 1 else None


def choose_group_size(input_features: Mapping[str, int], sizes: Sequence[int]) -> int:
    """Return the first of ``sizes`` that divides every linear's inputs; raise FlexQuantError if none does."""
    for size in sizes:
        if all(k % size == 0 for k in input_features.values()):
            return size
    name, k = next((name, k) for name, k in input_features.items() if k % sizes[-1])
    none = f"none of the group sizes {', '.join(map(str, sizes))} divides"
    advice = "add a smaller one to group_size, or choose a scheme without groups, such as W8A8"
    raise FlexQuantError(f"{name} has {k} input features, which {none}; {advice}")


def quantization_groups(arguments: JsonObject) -> dict[str, QuantizationScheme]:
    """Return group -> scheme from the arguments of a quantising modifier."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    try:
        given = arguments.get("config_groups", {})
        groups = {name: QuantizationScheme.model_validate(group) for name, group in given.items()}
    except ValueError as e:
        problem = "config_groups is not what compressed-tensors reads"
        raise FlexQuantError(f"{problem} ({said_by(e)}); correct it") from e
    if (scheme := arguments.get("scheme")) is not None:
        targets = scheme if isinstance(scheme, dict) else {scheme: arguments.get("targets", ["Linear"])}
        for number, (name, of_preset) in enumerate(targets.items()):
            if name.upper() not in PRESET_SCHEMES:
                problem = f"'{name}' is no scheme of compressed-tensors"
                raise FlexQuantError(f"{problem}; choose among {', '.join(PRESET_SCHEMES)}")
            groups[f"group_{number}"] = preset_name_to_scheme(name, list(of_preset))
    size = arguments.get("group_size")
    for group in groups.values():
        if isinstance(size, int) and _is_grouped(group):
            group.weights.group_size = size
    return groups


def schemes_of(recipe: VariantRecipe) -> list[QuantizationScheme]:
    """Return the schemes that a variant's recipe gives linears."""
    return [*quantization_groups(recipe.modifiers[recipe.quantizer]).values()]


def with_asymmetric_activations(arguments: JsonObject, model: PreTrainedModel) -> JsonObject:
    """Return a modifier's arguments, its INT8 activations by token with zero points, but for experts.

    Raises FlexQuantError for other activations, and where targets name experts.
    """
    from compressed_tensors.utils import match_named_modules

    groups: JsonObject = {}
    for name, group in quantization_groups(arguments).items():
        x = group.input_activations
        if x is None or (x.type, x.num_bits, x.strategy, x.dynamic) != ("int", 8, "token", True):
            what = "asymmetric_activations gives INT8 activations a zero point for each token"
            found = f"those for {', '.join(group.targets)} are not in INT8 by token"
            raise FlexQuantError(f"{what}, and {found}; remove it, or choose W8A8")
        matched = match_named_modules(model, group.targets, arguments.get("ignore", []))
        if any(EXPERTS.match(f"{path}.") for path, _ in matched):
            if group.targets != ["Linear"]:
                problem = "asymmetric_activations cannot leave out experts where"
                advice = f"give targets: [Linear], or add '{IN_EXPERTS}' to 'ignore'"
                raise FlexQuantError(f"{problem} {', '.join(group.targets)} names them; {advice}")
            symmetric = group.model_copy(update={"targets": [IN_EXPERTS]})
            groups[f"{name}_experts"] = symmetric.model_dump(mode="json", exclude_defaults=True)
        x.symmetric = False
        groups[name] = group.model_dump(mode="json", exclude_defaults=True)
    kept = {key: value for key, value in arguments.items() if key not in ("scheme", "targets")}
    return {**kept, "config_groups": groups}


def _is_grouped(scheme: QuantizationScheme) -> bool:
    """Whether a scheme has a weight scale for each group of input features."""
    return scheme.weights is not None and scheme.weights.strategy == "group"
