# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a recipe, a YAML document of schema ``flexquant.recipe/v1`` that says how each variant is made.

A variant lists llmcompressor's modifiers with their arguments; the last modifier quantises. Lists stand for
choices that are searched or depend on the model; the ``recipe.yaml`` in each variant's folder is the same
document with every choice made. Nothing here imports torch or llmcompressor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, create_model

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.texts import SELF
from flexquant.documents.yaml_document import (
    Document,
    Positive,
    Section,
    Text,
    from_yaml,
    read_named,
    read_section,
    says,
)
from flexquant.policy.schema import Head, VariantName
from flexquant.quantization.vocabulary import MODIFIERS, QUANTIZERS, ROTATES, ROTATIONS

SCHEMA: Literal["flexquant.recipe/v1"] = "flexquant.recipe/v1"
DEFAULT_RECIPE = "default"
UNROTATED = "unrotated"
"""The default recipe without what cannot be nested."""
PACKAGE = "flexquant.quantization.recipes"


class Calibration(Section):
    """The calibration text, and how much of it is used."""

    data: (
        Annotated[str, Field(strict=True), says(f"give a file, a folder, a dataset id, {SELF} or null")]
        | None
    ) = None
    """SELF, or what ``flexquant.documents.texts.read_documents`` takes."""
    samples: Positive = 128
    length: Annotated[int, Field(strict=True, ge=2), says("give a whole number of at least 2")] = 512
    """Tokens in a sample."""
    seed: Annotated[int, Field(strict=True, ge=0), says("give a whole number of at least 0")] = 0


class ScaleDistillation(Section):
    """Training of the scales of a weight-only variant, after the modifiers."""

    epochs: Positive
    """Passes over all calibration rows."""


_modifiers: dict[str, Any] = {name: (arguments, None) for name, arguments in MODIFIERS.items()}


class VariantSection(create_model("Modifiers", __base__=Section, **_modifiers)):  # type: ignore[misc]
    """A variant's modifiers, and the keys that are FlexQuant's own."""

    refused = ROTATIONS
    scale_distillation: Annotated[ScaleDistillation | None, says("give a mapping with the key epochs")] = None
    head: Annotated[Head, says(f"give one of {', '.join(get_args(Head))}")] = "stored"
    nested_in: VariantName | None = None


class RecipeSection(Section):
    """A recipe: how each variant is made."""

    schema_: Annotated[Literal["flexquant.recipe/v1"], says(f"this FlexQuant reads '{SCHEMA}' only")] = Field(
        alias="schema"
    )
    variants: Annotated[
        dict[VariantName, VariantSection], Field(min_length=1), says("give a mapping from names to modifiers")
    ]
    description: Text = ""
    policy: Annotated[Text | None, says("give text, in quotes if need be")] = None
    calibration: Calibration = Calibration()
    made_with: object = None
    measured: object = None
    """What each variant lost, by ``flexquant.checkpoint.measured_loss``; nothing is made by it."""


@dataclass(frozen=True)
class VariantRecipe:
    """How one variant is made."""

    name: str
    modifiers: Mapping[str, JsonObject]
    """Modifier -> arguments, in the order of use; the last modifier quantises."""
    scale_distillation: ScaleDistillation | None = None
    head: Head = "stored"
    """Precision of the lm_head: that of the model, or INT8 with one scale a row, rounded to nearest."""
    nested_in: str | None = None
    """The INT4 variant in which a merge can nest this one's INT8 weights; None: they are rounded freely."""
    place: str = field(default="", compare=False)
    """File, line and key, for messages."""

    @property
    def quantizer(self) -> str:
        return next(name for name in self.modifiers if name in QUANTIZERS)

    def to_json(self) -> JsonObject:
        """Return the variant's section of the document."""
        section: JsonObject = {name: dict(arguments) for name, arguments in self.modifiers.items()}
        if self.scale_distillation is not None:
            section["scale_distillation"] = self.scale_distillation.model_dump()
        if self.head != "stored":
            section["head"] = self.head
        if self.nested_in is not None:
            section["nested_in"] = self.nested_in
        return section


@dataclass(frozen=True)
class Recipe:
    """How all variants are made, from one set of calibration samples."""

    name: str
    """Name of a built-in recipe, or a file's path."""
    description: str
    variants: Mapping[str, VariantRecipe]
    calibration: Calibration = Calibration()
    policy: str | None = None
    """Name or path of the policy that suits these variants; None: the built-in default."""

    def with_head(self, head: Head | None) -> Self:
        """Return the recipe with the lm_head of all variants in this precision; None: as it is."""
        if head is None:
            return self
        return replace(self, variants={name: replace(v, head=head) for name, v in self.variants.items()})

    def nested(self, int8: Sequence[str], int4: str) -> Self:
        """Return the recipe with the variants ``int8``, where GPTQ quantises them, nested in ``int4``."""
        near = {
            name: replace(self.variants[name], nested_in=self.variants[name].nested_in or int4)
            for name in int8
            if _can_be_nested(self.variants[name].modifiers)
        }
        return replace(self, variants={**self.variants, **near})


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Load a recipe by built-in name or path; raise FlexQuantError if it is wrong or changes K or V."""
    content, source = read_named(str(name_or_path), PACKAGE, "recipe")
    return parse_recipe(content, source, str(name_or_path))


def parse_recipe(content: bytes, source: str, name: str) -> Recipe:
    """Validate a recipe's YAML; ``source`` opens the message of the FlexQuantError for a bad document."""
    document = from_yaml(content, source, "recipe", ("schema", "variants"))
    found = read_section(RecipeSection, document)
    variants = {key: _variant(key, section, document) for key, section in found.variants.items()}
    return Recipe(name, found.description, variants, found.calibration, found.policy)


def _variant(name: str, section: VariantSection, document: Document) -> VariantRecipe:
    path = ("variants", name)
    modifiers = {key: value for key, value in document.data["variants"][name].items() if key in MODIFIERS}
    quantizers = [key for key in modifiers if key in QUANTIZERS]
    if len(quantizers) != 1 or list(modifiers)[-1:] != quantizers:
        given, allowed = ", ".join(modifiers) or "none", ", ".join(QUANTIZERS)
        document.fail(path, f"has the modifiers {given}; give exactly one of {allowed}, as the last one")
    if ROTATES in modifiers and list(modifiers)[-2] != ROTATES:
        document.fail(path, f"moves scales behind {ROTATES}; put it right before {quantizers[0]}")
    if section.nested_in is not None and (section.nested_in == name or not _can_be_nested(modifiers)):
        takes = f"GPTQModifier without first_token_weight, and no {ROTATES}"
        document.fail(
            path, f"has nested_in, which takes another variant's name, {takes}; correct or remove it"
        )
    keys = section.scale_distillation, section.head, section.nested_in
    return VariantRecipe(name, modifiers, *keys, document.place(path))


def _can_be_nested(modifiers: Mapping[str, JsonObject]) -> bool:
    plain = "first_token_weight" not in modifiers.get("GPTQModifier", {"first_token_weight": 1})
    return plain and ROTATES not in modifiers
