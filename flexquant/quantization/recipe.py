# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a recipe, a YAML document of schema ``flexquant.recipe/v1`` that says how each variant is made.

    variants:
      w8a8:
        SmoothQuantModifier: {smoothing_strength: [0.3, 0.5, 0.7]}      # searched per layer
        GPTQModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8}

A variant lists llmcompressor's modifiers with their arguments; the last modifier quantises. The keys
``sensitive_layers`` and ``scale_distillation`` are ours. Lists stand for choices that are searched or depend
on the model; the ``recipe.yaml`` in each variant's folder is the same document with every choice made.
Recipes that would change the KV cache are refused. Nothing here imports torch or llmcompressor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flexquant.checkpoint.merged_config import check_variant_name
from flexquant.documents.named_files import builtin_names, read_named
from flexquant.documents.texts import SELF
from flexquant.documents.yaml_document import Document, KeyPath, from_yaml, show
from flexquant.errors import FlexQuantError
from flexquant.quantization.vocabulary import MODIFIERS, QUANTIZERS, REFUSED_ARGUMENTS, REFUSED_MODIFIERS

SCHEMA = "flexquant.recipe/v1"
DEFAULT_RECIPE = "default"
PACKAGE = "flexquant.quantization.recipes"


@dataclass(frozen=True)
class Calibration:
    """The calibration text, and how much of it is used."""

    data: str | None = None
    """SELF, or what ``flexquant.documents.texts.read_documents`` takes."""
    samples: int = 128
    length: int = 512
    """Tokens in a sample."""
    seed: int = 0


@dataclass(frozen=True)
class SensitiveLayers:
    """A search for the linears to spare, by their effect on the logits."""

    budget: float
    """Largest share, 0 to 1, of the quantised parameters that may be spared."""
    scheme: str | None = None
    """Preset for the spared linears; None: 16 bit."""


@dataclass(frozen=True)
class ScaleDistillation:
    """Training of the scales of a weight-only variant, after the modifiers."""

    epochs: int
    """Passes over all calibration rows."""


@dataclass(frozen=True)
class VariantRecipe:
    """How one variant is made."""

    name: str
    modifiers: Mapping[str, Mapping[str, Any]]
    """Modifier -> arguments, in the order of use; the last modifier quantises."""
    sensitive_layers: SensitiveLayers | None = None
    scale_distillation: ScaleDistillation | None = None
    place: str = field(default="", compare=False)
    """File, line and key, for messages."""

    @property
    def quantizer(self) -> str:
        return next(name for name in self.modifiers if name in QUANTIZERS)

    def to_json(self) -> dict[str, Any]:
        """Return the variant's section of the document."""
        section: dict[str, Any] = {name: dict(arguments) for name, arguments in self.modifiers.items()}
        if self.sensitive_layers is not None:
            section["sensitive_layers"] = asdict(self.sensitive_layers)
        if self.scale_distillation is not None:
            section["scale_distillation"] = asdict(self.scale_distillation)
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


def builtin_recipes() -> list[str]:
    """Return the sorted names of the recipes that come with FlexQuant."""
    return builtin_names(PACKAGE)


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Load a built-in recipe by name, or a recipe file by path.

    :func:`~flexquant.documents.named_files.read_named` tells names from paths. Raises FlexQuantError, with
    the line and what is allowed, for an unknown name, a file that cannot be read, a document that breaks the
    schema, and a recipe that would change the KV cache.
    """
    content, source = read_named(str(name_or_path), PACKAGE, "recipe")
    return parse_recipe(content, source, str(name_or_path))


def parse_recipe(content: bytes, source: str, name: str) -> Recipe:
    """Validate a recipe's YAML; ``source`` opens the message of the FlexQuantError for a bad document."""
    document = from_yaml(content, source, "recipe", ("schema", "variants"))
    data = document.data
    document.check_keys(
        data, (), ("schema", "variants"), ("description", "policy", "calibration", "made_with")
    )
    if data["schema"] != SCHEMA:
        document.fail(("schema",), f"is {show(data['schema'])}; this FlexQuant reads '{SCHEMA}' only")
    for key in ("description", "policy"):
        if not isinstance(data.get(key, ""), str):
            document.fail((key,), f"is {show(data[key])}; give text, in quotes if need be")
    variants = data["variants"]
    if not isinstance(variants, dict) or not variants:
        document.fail(("variants",), f"is {show(variants)}; give a mapping from names to modifiers")
    return Recipe(
        name,
        data.get("description", ""),
        {key: _variant(key, section, document) for key, section in variants.items()},
        _calibration(data.get("calibration", {}), document),
        data.get("policy"),
    )


def _calibration(value: Any, document: Document) -> Calibration:
    path: KeyPath = ("calibration",)
    document.check_keys(value, path, (), tuple(asdict(Calibration())))
    if not isinstance(value.get("data"), (str, type(None))):
        document.fail(
            (*path, "data"),
            f"is {show(value['data'])}; give a file, a folder, a dataset id, {SELF} or null",
        )
    for key, minimum in {"samples": 1, "length": 2, "seed": 0}.items():
        _check_number(value.get(key, minimum), minimum, (*path, key), document)
    return Calibration(**value)


def _variant(name: str, section: Any, document: Document) -> VariantRecipe:
    path: KeyPath = ("variants", name)
    try:
        check_variant_name(name)
    except FlexQuantError as e:
        document.fail(path, f"is wrong: {e}")
    if isinstance(section, dict):
        for key in section.keys() & REFUSED_MODIFIERS.keys():
            document.fail((*path, key), f"is refused: it {REFUSED_MODIFIERS[key]}")
    document.check_keys(section, path, (), (*MODIFIERS, "sensitive_layers", "scale_distillation"))
    modifiers = {key: value for key, value in section.items() if key in MODIFIERS}
    quantizers = [key for key in modifiers if key in QUANTIZERS]
    if len(quantizers) != 1 or list(modifiers)[-1:] != quantizers:
        document.fail(
            path,
            f"has the modifiers {', '.join(modifiers) or 'none'}; give exactly one of "
            f"{', '.join(QUANTIZERS)}, as the last one",
        )
    for key, arguments in modifiers.items():
        _check_arguments(key, arguments, (*path, key), document)
    spared = section.get("sensitive_layers")
    if "sensitive_layers" in section:
        spared = _sensitive_layers(spared, (*path, "sensitive_layers"), document)
    distilled = section.get("scale_distillation")
    if "scale_distillation" in section:
        distilled = _scale_distillation(distilled, (*path, "scale_distillation"), document)
    return VariantRecipe(name, modifiers, spared, distilled, document.place(path))


def _check_arguments(modifier: str, arguments: Any, path: KeyPath, document: Document) -> None:
    allowed = MODIFIERS[modifier]
    required = ("smoothing_strength",) if modifier == "SmoothQuantModifier" else ()
    if isinstance(arguments, dict):
        for key in arguments.keys() & REFUSED_ARGUMENTS.keys():
            if arguments[key] is not None:
                document.fail((*path, key), f"is refused: {REFUSED_ARGUMENTS[key]}")
    document.check_keys(arguments, path, required, tuple(a for a in allowed if a not in required))
    for key, value in arguments.items():
        if problem := allowed[key](value):
            document.fail((*path, key), f"is {show(value)}; {problem}")
    if modifier in QUANTIZERS and ("scheme" in arguments) == ("config_groups" in arguments):
        document.fail(path, "needs either 'scheme', such as W8A8 or W4A16, or 'config_groups'; give one")
    if "observer" in arguments and arguments.keys() & {"weight_observer", "input_observer"}:
        document.fail((*path, "observer"), "is given beside weight_observer or input_observer; remove one")


def _sensitive_layers(value: Any, path: KeyPath, document: Document) -> SensitiveLayers:
    document.check_keys(value, path, ("budget",), ("scheme",))
    budget, scheme = value["budget"], value.get("scheme")
    if not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 < budget < 1:
        document.fail((*path, "budget"), f"is {show(budget)}; give the share of parameters, between 0 and 1")
    if not isinstance(scheme, (str, type(None))):
        document.fail((*path, "scheme"), f"is {show(scheme)}; give a preset such as W8A8, or null for 16 bit")
    return SensitiveLayers(float(budget), scheme)


def _scale_distillation(value: Any, path: KeyPath, document: Document) -> ScaleDistillation:
    document.check_keys(value, path, ("epochs",), ())
    _check_number(value["epochs"], 1, (*path, "epochs"), document)
    return ScaleDistillation(value["epochs"])


def _check_number(number: Any, minimum: int, path: KeyPath, document: Document) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < minimum:
        document.fail(path, f"is {show(number)}; give a whole number of at least {minimum}")
