# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define what a recipe may hold: llmcompressor's modifiers, their arguments, and the allowed values.

The names are llmcompressor's, except ``group_size`` and ``asymmetric_activations``, which its presets fix,
``where_possible``, which decides what becomes of a rotation that a model cannot have, and
``first_token_weight``, which selects :class:`flexquant.quantization.modifiers.TokenNormalizedGPTQ`. A recipe
is checked by them, line by line, before anything heavy is imported.

What would change K, V and states is refused, so that the variants can share one KV cache. Scales may move
from a norm into all linears that read it, gates of a state included, and from up_proj into down_proj. They
may not move out of v_proj or k_proj, into a norm of the heads, or out of what writes a state: such a model is
right on its own cache, and wrong on the other variants'.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, Self, TypeGuard

from pydantic import AfterValidator, Field, model_validator

from flexquant.documents.yaml_document import Positive, Problem, Section, says, show

SHARED_CACHE = (
    "would make this variant's KV cache another than that of the variants it is to share one cache with"
)
ROUNDED_OUTPUTS = f"rounded outputs of k_proj and v_proj {SHARED_CACHE}"

_LAYER = "model.layers.0."
_UP, _DOWN = "mlp.up_proj", "mlp.down_proj"
_GATES = ("linear_attn.in_proj_ba", "linear_attn.in_proj_a", "mamba.dt_proj")
_CONVOLUTIONS = ("linear_attn.conv1d", "mamba.conv1d", "mixer.conv1d", "conv.conv")
_CACHED = {
    "self_attn.v_proj": "scales V",
    "self_attn.k_proj": "scales K",
    "self_attn.q_proj": "scales Q, and K in return",
    "self_attn.qkv_proj": "scales Q, K and V",
    "self_attn.k_norm": "scales K",
    "self_attn.q_norm": "scales Q, and K in return",
    "linear_attn.in_proj_b": "scales what goes into the state",
    **dict.fromkeys(("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv"), "scales the state"),
    **dict.fromkeys(("mamba.in_proj", "mamba.x_proj", "mixer.in_proj", "conv.in_proj"), "scales the state"),
    **dict.fromkeys(_CONVOLUTIONS, "scales the state"),
    **dict.fromkeys(_GATES, "changes what the state forgets"),
}
"""Module -> how moving scales out of it changes the KV cache."""
_UNBALANCED = {
    **dict.fromkeys(
        ("self_attn.o_proj", "mlp.down_proj", "linear_attn.out_proj"),
        "has no linear behind it that could take the scales back",
    ),
    **dict.fromkeys(("mlp.gate_proj", "linear_attn.in_proj_z"), "is not linear in what follows it"),
}
"""Module -> why moving scales out of it changes what the model computes."""
NAMED_MAPPINGS = ("norms", "norms-and-up")
"""Names of sets of mappings: from norms to the linears that read them; the same and up_proj to down_proj."""
NAMES = 'give a list of module names, classes or regular expressions such as "re:.*q_proj$"'


def check_patterns(names: Sequence[str]) -> str | None:
    """Return why one of the names, which may be regular expressions, is refused; None if none is."""
    for name in names:
        try:
            if name.startswith("re:"):
                re.compile(name[3:])
        except re.error as e:
            return f"correct '{name}', which is no regular expression ({e})"
    return None


def check_mapping(balance: Sequence[str], smooth: str) -> str | None:
    """Return why a mapping from ``smooth`` to the ``balance`` linears is refused; None if it is not."""
    if problem := check_patterns([*balance, smooth]):
        return problem
    for name, effect in (_CACHED | _UNBALANCED).items():
        if _may_match(name, smooth):
            fatal = SHARED_CACHE if name in _CACHED else "would change what the model computes"
            why = f"smoothing {name.split('.')[1]} {effect}, which {fatal}"
            may = "scales may move from a norm into all linears that read it, and from up_proj into down_proj"
            return f"remove the mapping from '{smooth}': {why}; {may}"
    if _may_match(_UP, smooth) and not all(_may_match(_DOWN, name) for name in balance):
        return f"give '{smooth}' the one linear down_proj, whose input is all that it scales"
    if not _may_match(_UP, smooth) and any(_may_match(_DOWN, name) for name in balance):
        return f"smooth down_proj behind up_proj, not behind '{smooth}'"
    return None


def check_targets(targets: Sequence[str]) -> str | None:
    """Return why the targets are refused, if they match embeddings or attention itself; else None."""
    if problem := check_patterns(targets):
        return problem
    for target in targets:
        if target == "Embedding" or _may_match("embed_tokens", target, layer="model."):
            return f"remove '{target}': embeddings stay in 16 bit, since the variants share them"
        if target.endswith("Attention") or _may_match("self_attn", target):
            return f"remove '{target}': quantised attention {SHARED_CACHE}; name its linears"
        if target == "Conv1d" or any(_may_match(name, target) for name in _CONVOLUTIONS):
            return f"remove '{target}': a quantised convolution {SHARED_CACHE}, since it writes a state"
    return None


def _may_match(name: str, target: str, layer: str = _LAYER) -> bool:
    if target.startswith("re:"):
        return bool(re.match(target[3:], layer + name))
    return target == name or target.endswith(f".{name}")


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
    if isinstance(value, dict) and value:
        return next((problem for targets in value.values() if (problem := _targets(targets))), None)
    if isinstance(value, str) and value:
        return None
    return "give the name of a preset such as W8A8, or a mapping from presets to lists of targets"


def _config_groups(value: object) -> str | None:
    if not isinstance(value, dict) or not value or not all(isinstance(g, dict) for g in value.values()):
        return "give a mapping from names to groups with targets, weights and input_activations"
    for name, group in value.items():
        if group.get("output_activations") is not None:
            return f"remove output_activations from {name}: {ROUNDED_OUTPUTS}"
        if problem := _targets(group.get("targets")):
            return f"correct the targets of {name}: {problem}"
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
AboveZero = Annotated[float, Field(strict=True, gt=0), says("give a number above 0")]
Name = Annotated[str, Field(strict=True, min_length=1), says("give text")]
Names = Annotated[
    list[Annotated[str, Field(strict=True)]],
    Field(min_length=1),
    says(NAMES, whole=True),
    _checked(check_patterns),
]
Size = Annotated[int, Field(strict=True, ge=1)]
Sizes = Annotated[
    Size | Annotated[list[Size], Field(min_length=1)],
    says("give a number of input features, or a list of which the first that fits is taken", whole=True),
]
Mappings = Annotated[object, _checked(_mappings)]


class Modifier(Section):
    """The arguments of one of llmcompressor's modifiers; what is left out gets llmcompressor's default."""

    refused = {
        "kv_cache_scheme": f"a variant's own scales for K and V {SHARED_CACHE}; set vLLM's --kv-cache-dtype",
        **dict.fromkeys(("output_activations", "output_observer"), f"{ROUNDED_OUTPUTS}; remove it"),
    }


class SmoothQuant(Modifier):
    """SmoothQuant, whose strength may be searched."""

    smoothing_strength: Annotated[
        Share
        | Annotated[list[Share], Field(min_length=1)]
        | Annotated[dict[str, Share | None], Field(min_length=1)],
        says(
            "give a number from 0 to 1, a list of them to search, or a mapping from the names of smooth "
            "modules to a number or null",
            whole=True,
        ),
    ]
    mappings: Mappings = None
    ignore: Names = []


class AWQ(Modifier):
    """AWQ's scaling of weights, which rounds nothing."""

    mappings: Mappings = None
    duo_scaling: Annotated[Literal[True, False, "both"], says("give one of true, false, both")] = True
    n_grid: Annotated[int, Field(strict=True, ge=4), says("give a whole number of at least 4")] = 20


class QuIP(Modifier):
    """QuIP's rotation of linears' inputs, in blocks; it runs with the model, and is undone in the weights."""

    targets: Annotated[object, _checked(_targets)]
    transform_block_size: Sizes
    transform_type: Annotated[
        Literal["hadamard", "random-hadamard"], says("give one of hadamard, random-hadamard")
    ] = "random-hadamard"
    ignore: Names = []
    where_possible: Annotated[bool, Field(strict=True), says("give true or false")] = False
    """Whether a model that cannot have the rotation is quantised without it, or else refused."""


class Quantizer(Modifier):
    """A modifier that quantises; a variant has exactly one."""

    targets: Annotated[object, _checked(_targets)] = None
    ignore: Names = []
    scheme: Annotated[object, _checked(_scheme)] = None
    config_groups: Annotated[object, _checked(_config_groups)] = None
    group_size: Sizes = 1
    asymmetric_activations: Annotated[bool, Field(strict=True), says("give true or false")] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
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
    observer: Annotated[
        dict[Literal["weights", "input"], Name],
        Field(min_length=1),
        says("give a mapping such as {weights: memoryless_mse}, or use weight_observer", whole=True),
    ] = {}


class GPTQ(Rounding):
    block_size: Positive = 128
    dampening_frac: Annotated[Share, says("give a number from 0 to 1")] = 0.01
    actorder: Annotated[Literal["static", "weight"], says("give one of static, weight, null")] | None = None
    first_token_weight: AboveZero = 1.0


class AutoRound(Quantizer):
    """AutoRound, which trains the rounding of each decoder layer."""

    iters: Positive = 200
    batch_size: Positive = 8
    lr: AboveZero = 1.0


TRANSFORMS: Mapping[str, type[Modifier]] = {"SmoothQuantModifier": SmoothQuant, "AWQModifier": AWQ}
"""Modifier that moves ranges between layers -> its arguments."""
ROTATES = "QuIPModifier"
QUANTIZERS: Mapping[str, type[Modifier]] = {
    "GPTQModifier": GPTQ,
    "QuantizationModifier": Rounding,
    "AutoRoundModifier": AutoRound,
}
"""Modifier that quantises -> its arguments."""
MODIFIERS: Mapping[str, type[Modifier]] = {**TRANSFORMS, ROTATES: QuIP, **QUANTIZERS}

ROTATIONS = dict.fromkeys(
    ("SpinQuantModifier", "TransformModifier"),
    f"it rotates heads and the residual stream, and rotated K and V {SHARED_CACHE}; {ROTATES} rotates inputs",
)
"""Keys of a variant that are refused -> the reason."""
