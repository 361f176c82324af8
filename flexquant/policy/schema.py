# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the keys of a policy document, schema ``flexquant.policy/v1``.

These models also make the JSON Schema with which editors complete and check a policy. `flexquant policy
schema` prints it, and ``policy.schema.json`` lies beside the built-in policies.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from flexquant.checkpoint.merged_config import VARIANT_NAME, check_variant_name
from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.yaml_document import (
    KEYS_AS_GIVEN,
    OptionalPositive,
    Positive,
    Problem,
    Section,
    Text,
    says,
)
from flexquant.errors import FlexQuantError
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.plans import plan_name

SCHEMA: Literal["flexquant.policy/v1"] = "flexquant.policy/v1"
MAX_RULES = 64
LAYERS = re.compile(r"(0|-?[1-9]\d*)(?:-(0|-?[1-9]\d*))?")
Phase = Literal["prefill", "decode", "mixed"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases of passes: prompt chunks only, sequences in generation only, both."""
Activations = Literal["int8", "fp8"]
DerivedWeights = Literal["int4", "int8", "fp8"]
Head = Literal["stored", "int8"]


def parse_layers(text: str) -> tuple[int, int]:
    """Return the first and the last layer of a key such as ``0-3`` or ``-1``; raise Problem for another."""
    match = LAYERS.fullmatch(text)
    if match is None:
        raise Problem('does not name layers; write a number or a range such as "5", "0-3" or "-4--1"')
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last and (first < 0) == (last < 0):
        raise Problem(f'runs backwards; write "{last}-{first}"')
    return first, last


def _check_name(name: str) -> str:
    try:
        check_variant_name(name)
    except FlexQuantError as e:
        raise Problem(f"is wrong: {e}") from e
    return name


VariantName = Annotated[
    str,
    AfterValidator(_check_name),
    Field(strict=True, json_schema_extra={"pattern": f"^{VARIANT_NAME.pattern}$"}),
    says("give the name of a variant, e.g. w8a8"),
]
LayersKey = Annotated[
    str,
    AfterValidator(lambda text: parse_layers(text) and text),
    Field(json_schema_extra={"pattern": f"^({LAYERS.pattern})$"}),
]
NOT_EMPTY = ConfigDict(json_schema_extra={"minProperties": 1})


class Bounds(Section):
    """A range of whole numbers, both ends included."""

    model_config = NOT_EMPTY

    min: Positive = 1
    max: OptionalPositive = None
    """Largest number; without it there is no upper end."""

    def __contains__(self, number: int) -> bool:
        return self.min <= number and (self.max is None or number <= self.max)

    def starts(self, unit: int = 1) -> set[int]:
        """Return the first size in the range and the first above it, in tokens if it has ``unit`` tokens."""
        first = (self.min - 1) * unit + 1
        return {first} if self.max is None else {first, self.max * unit + 1}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model_fields_set:
            raise Problem("is empty; give min, max or both")
        if self.max is not None and self.min > self.max:
            raise Problem(f"has min {self.min} above max {self.max}; correct one of the two")
        return self


class When(Section):
    """Conditions of a rule; it takes the forward passes for which all of them hold."""

    model_config = NOT_EMPTY

    phase: Annotated[
        Phase | Annotated[list[Phase], Field(min_length=1)],
        says(f"give one of {', '.join(PHASES)}, or a list of them", whole=True),
    ] = list(PHASES)
    """prefill: prompt chunks only; decode: sequences in generation only; mixed: both."""
    batch_size: Bounds = Bounds.model_construct()
    """Sequences of a decode pass."""
    tokens: Bounds = Bounds.model_construct()
    """Tokens of a pass, padding included."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        names = [self.phase] if isinstance(self.phase, str) else self.phase
        return tuple(phase for phase in PHASES if phase in names)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model_fields_set:
            raise Problem(f"is empty; give at least one of {', '.join(type(self).model_fields)}")
        if "batch_size" in self.model_fields_set and self.phases != ("decode",):
            problem = f"is for a rule with 'phase: decode' only, but this one has {', '.join(self.phases)}"
            raise Problem(f"{problem}; use 'tokens' instead", ["batch_size"])
        if self.tokens.max is not None and self.tokens.max < self.batch_size.min:
            raise Problem("can never match: a sequence has at least one token; correct tokens or batch_size")
        return self


class Use(Section):
    """A variant, and other variants for some layers."""

    default: VariantName
    layers: Annotated[
        dict[LayersKey, VariantName],
        Field(min_length=1, json_schema_extra=KEYS_AS_GIVEN),
        says('give a mapping from layers to variants, e.g. "0-3": w8a8'),
    ]
    """Layers by number or range, e.g. "0-3"; negative numbers count from the end."""


class Rule(Section):
    """The first rule that takes a pass decides."""

    use: Annotated[
        Annotated[VariantName, Tag("<name>")] | Annotated[Use, Tag("<mapping>")],
        Discriminator(lambda value: "<mapping>" if isinstance(value, dict) else "<name>"),
    ]
    """The variant that runs the pass, with others for some layers or without."""
    when: When = When.model_construct()
    """Every rule but the last has it."""

    @property
    def variant(self) -> str:
        """The variant of all layers but ``layers``."""
        return self.use if isinstance(self.use, str) else self.use.default

    @property
    def layers(self) -> Mapping[str, str]:
        """Layers as written in the policy, e.g. ``0-3`` -> their variant."""
        return {} if isinstance(self.use, str) else self.use.layers

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.variant, *self.layers.values()]))

    @property
    def plan_text(self) -> str:
        """The plan with its layers as written in the policy, e.g. ``w4a16+w8a8[0-3,-1]``."""
        texts = {name: [t for t, v in self.layers.items() if v == name] for name in self.layers.values()}
        return plan_name(self.variant, {name: ",".join(found) for name, found in texts.items()})

    def matches(self, phase: Phase, tokens: int, batch_size: int) -> bool:
        """Whether the rule takes a pass; ``batch_size`` matters in decode only."""
        when = self.when
        return phase in when.phases and tokens in when.tokens and batch_size in when.batch_size


class Derivation(Section):
    """A variant computed from a checkpoint's, while loading or (8-bit `weights`) in each pass."""

    source: VariantName = Field(alias="from")
    """The variant whose weights it has: in INT4, or, for 8-bit `weights`, in 16 bit."""
    activations: Annotated[Activations, says(f"give one of {', '.join(get_args(Activations))}")]
    """Type to which activations are quantised, per token."""
    weights: Annotated[DerivedWeights, says(f"give one of {', '.join(get_args(DerivedWeights))}")] = "int4"
    """int4: a second copy, in the layout of another kernel. int8, fp8: no copy, each pass computes them."""

    @property
    def is_one_copy(self) -> bool:
        return self.weights != "int4"


class PolicySection(Section):
    """A FlexQuant policy: which variant runs each forward pass."""

    schema_: Annotated[Literal["flexquant.policy/v1"], says(f"this FlexQuant reads '{SCHEMA}' only")] = Field(
        alias="schema"
    )
    rules: Annotated[
        list[Rule],
        Field(min_length=1, json_schema_extra={"maxItems": MAX_RULES}),
        says("give a list of at least one rule"),
    ]
    """The first rule that takes a pass decides; the last rule has no `when`."""
    description: Text = ""
    derive: Annotated[
        dict[VariantName, Derivation], says("give a mapping such as w4a8: {from: w4a16, activations: int8}")
    ] = {}
    """Variants computed from a checkpoint's, while loading or (8-bit `weights`) in each pass, by name."""
    head: Annotated[Head, says(f"give one of {', '.join(get_args(Head))}")] = "stored"
    """Precision of the lm_head: as the checkpoint stores it, or INT8 with one scale a row."""
    measured: PassTimes | None = None

    @field_validator("rules")
    @classmethod
    def _check_count(cls, rules: list[Rule]) -> list[Rule]:
        if len(rules) > MAX_RULES:
            raise Problem(f"has {len(rules)} rules; write at most {MAX_RULES}")
        return rules


def json_schema() -> JsonObject:
    """Return the JSON Schema of a policy document, without references, so that it fits into OpenAPI too."""
    schema = PolicySection.model_json_schema(by_alias=True)
    inlined = _inlined(schema, schema.pop("$defs"))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **inlined}


def _inlined(schema: JsonObject, definitions: JsonObject) -> JsonObject:
    """Return a JSON Schema with definitions for references, without defaults of null, which is refused."""

    def rewritten(value: object) -> object:
        if isinstance(value, list):
            return [rewritten(item) for item in value]
        return _inlined(value, definitions) if isinstance(value, dict) else value

    if (name := schema.get("$ref", "").removeprefix("#/$defs/")) in definitions:
        schema = {**definitions[name], **schema}
        del schema["$ref"]
    return {key: rewritten(item) for key, item in schema.items() if not (key == "default" and item is None)}
