# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a policy, a YAML document of schema ``flexquant.policy/v1``, into validated rules.

    rules:                                   # first match wins; the last rule has no `when`
      - when: {phase: decode, batch_size: {max: 32}}
        use: {default: w4a16, layers: {"0-3": w8a8, "-1": w8a8}}
      - use: w8a8

A policy can derive variants that the checkpoint does not hold; they are computed from a stored one on
loading:

    derive:
      w4a8: {from: w4a16, activations: int8}

A policy file and a document stored in a merged checkpoint go through one validator: a file is first
turned into a plain document plus the line of each key, which the messages then name. What depends on the
model (its variants and layers) is checked by :func:`flexquant.policy.routes.build_route_table`. Nothing here
imports torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.yaml_document import (
    Document,
    KeyPath,
    builtin_names,
    from_data,
    from_yaml,
    read_named,
    read_section,
)
from flexquant.policy.pass_times import PassTimes, measured_pass_times
from flexquant.policy.plans import plan_name
from flexquant.policy.schema import (
    Activations,
    Bounds,
    DerivedSection,
    DerivedWeights,
    PolicySection,
    RuleSection,
    parse_layers,
)

PACKAGE = "flexquant.policies"


@dataclass(frozen=True)
class LayerRange:
    """The variant of layers ``first`` to ``last``, both included; negative ones count from the end."""

    first: int
    last: int
    variant: str
    text: str
    """The range as written in the policy."""
    place: str = field(compare=False)
    """File, line and key, for messages."""


@dataclass(frozen=True)
class Rule:
    """The forward passes that a rule takes, and the variant that runs each of their layers."""

    phases: tuple[str, ...]
    tokens: Bounds
    batch_size: Bounds
    variant: str
    layers: tuple[LayerRange, ...]
    place: str = field(compare=False)
    """File, line and key of ``use``, for messages."""

    def matches(self, phase: str, tokens: int, batch_size: int) -> bool:
        """Whether the rule takes a pass; ``batch_size`` matters in decode only."""
        return phase in self.phases and tokens in self.tokens and batch_size in self.batch_size

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.variant, *(layers.variant for layers in self.layers)]))

    @property
    def plan_text(self) -> str:
        """The plan with its layers as written in the policy, e.g. ``w4a16+w8a8[0-3,-1]``."""
        exceptions: dict[str, list[str]] = {}
        for layers in self.layers:
            exceptions.setdefault(layers.variant, []).append(layers.text)
        return plan_name(self.variant, {name: ",".join(texts) for name, texts in exceptions.items()})


@dataclass(frozen=True)
class Derivation:
    """A variant with the weights of ``source``, a checkpoint's variant, and 8-bit activations."""

    source: str
    activations: Activations
    place: str = field(compare=False)
    """File, line and key, for messages."""
    weights: DerivedWeights = "int4"
    """``int8``: each pass computes INT8 weights from the source's, and the variant has none of its own."""

    @property
    def is_one_copy(self) -> bool:
        return self.weights == "int8"


@dataclass(frozen=True)
class Policy:
    """Validated rules; the first that matches a pass decides, and the last matches every pass."""

    name: str
    """Name of a built-in policy, path of a file, or the given source."""
    description: str
    rules: tuple[Rule, ...]
    derived: dict[str, Derivation]
    """Name -> derivation of a variant that is computed from a checkpoint's variant."""
    measured: PassTimes | None
    """Times of the variants' passes on the machine on which the policy was tuned."""
    document: JsonObject
    """The policy as plain JSON-able data, which :func:`parse_policy` reads back."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for rule in self.rules for name in rule.variants))


def builtin_policies() -> list[str]:
    """Return the sorted names of the policies that come with FlexQuant."""
    return builtin_names(PACKAGE)


def load_policy(name_or_path: str) -> Policy:
    """Load a built-in policy by name, or a policy file by path.

    :func:`~flexquant.documents.yaml_document.read_named` tells names from paths. Raises
    :class:`FlexQuantError` for an unknown name, an unreadable file, and a document that breaks the schema.
    """
    content, source = read_named(name_or_path, PACKAGE, "policy")
    return parse_policy_text(content, source, name_or_path)


def parse_policy_text(content: bytes, source: str, name: str) -> Policy:
    """Validate a policy given as YAML, or as JSON, which is YAML.

    Raises :class:`FlexQuantError`, whose message begins with ``source`` and the line, for bad syntax and for
    a document that breaks the schema. ``name`` becomes the policy's name.
    """
    return _validate(from_yaml(content, source, "policy", ("schema", "rules")), name)


def parse_policy(document: JsonObject, source: str = "stored policy") -> Policy:
    """Validate a policy given as data, e.g. the one stored in a merged checkpoint.

    ``source`` becomes the policy's name. Raises :class:`FlexQuantError`, whose message begins with
    ``source``, for a document that breaks the schema.
    """
    return _validate(from_data(document, source, "policy"), source)


def add_derivations(
    document: JsonObject, variants: Iterable[str], policies: Mapping[str, Policy]
) -> JsonObject:
    """Return the document with the derivations in the policies of ``variants`` added."""
    derived = dict(document.get("derive", {}))
    for variant in sorted(set(variants)):
        derived |= policies[variant].document.get("derive", {})
    return {**document, "derive": derived} if derived else document


def _validate(document: Document, name: str) -> Policy:
    found = read_section(PolicySection, document)
    rules: list[Rule] = []
    for i, entry in enumerate(found.rules):
        path = ("rules", i)
        has_when = "when" in entry.model_fields_set
        is_last = i == len(found.rules) - 1
        if is_last and has_when:
            document.fail(
                (*path, "when"),
                "is in the last rule, which must take every pass; remove it, or add a last rule",
            )
        if not is_last and not has_when:
            document.fail(
                path, "has no 'when', so no later rule can match; add one, or move the rule to the end"
            )
        rule = _rule(entry, path, document)
        if not is_last and not _can_match(rule, rules):
            document.fail(
                path, "can never match, because earlier rules take all its passes; remove or move it"
            )
        rules.append(rule)
    derived = _derivations(found.derive, document)
    used = {variant for rule in rules for variant in rule.variants}
    for variant in derived:
        if variant not in used:
            document.fail(("derive", variant), "is used by no rule; remove it, or use it in one")
    measured = None if found.measured is None else measured_pass_times(found.measured)
    return Policy(name, found.description, tuple(rules), derived, measured, document.data)


def _derivations(found: Mapping[str, DerivedSection], document: Document) -> dict[str, Derivation]:
    derived = {}
    for name, entry in found.items():
        path = ("derive", name)
        if entry.source in found:
            document.fail(
                (*path, "from"), f"is '{entry.source}', itself derived; name a variant of the checkpoint"
            )
        if entry.weights == "int8" and entry.activations != "int8":
            document.fail((*path, "activations"), f"is '{entry.activations}'; INT8 weights need int8")
        derived[name] = Derivation(entry.source, entry.activations, document.place(path), entry.weights)
    return derived


def _rule(entry: RuleSection, path: KeyPath, document: Document) -> Rule:
    when, use, use_path = entry.when, entry.use, (*path, "use")
    layers: tuple[LayerRange, ...] = ()
    if isinstance(use, str):
        variant, place = use, document.place(use_path)
    else:
        variant, place = use.default, document.place((*use_path, "default"))
        layers = tuple(
            LayerRange(*parse_layers(text), other, text, document.place((*use_path, "layers", text)))
            for text, other in use.layers.items()
        )
    return Rule(when.phases, when.tokens, when.batch_size, variant, layers, place)


def _can_match(rule: Rule, earlier: Sequence[Rule]) -> bool:
    """Whether some pass reaches the rule, rather than an earlier one.

    Only sizes at which a range begins, or just above an end, need a test: if earlier rules miss a pass of the
    rule, they miss one of these.
    """
    for phase in rule.phases:
        in_phase = [other for other in earlier if phase in other.phases]
        for tokens in _starts(rule.tokens, [other.tokens for other in in_phase]):
            batches = [other.batch_size for other in in_phase if tokens in other.tokens]
            for batch_size in _starts(rule.batch_size, batches):
                if not any(batch_size in other for other in batches):
                    return True
    return False


def _starts(bounds: Bounds, others: Sequence[Bounds]) -> set[int]:
    return {bounds.min} | {start for other in others for start in other.starts() if start in bounds}
