# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policies: a YAML document (schema ``flexquant.policy/v1``) read into validated rules.

    rules:                                   # first match wins; the last rule has no `when`
      - when: {phase: decode, batch_size: {max: 32}}
        use: {default: w4a16, layers: {"0-3": w8a8, "-1": w8a8}}
      - use: w8a8

A policy may name variants that the checkpoint does not hold, computed while loading from one that it does:

    derive:
      w4a8: {from: w4a16, activations: int8}

Rules for decode may ask for more than sizes: how many decode passes ago a prompt was computed
(``since_prompt``), and whether the policy's trigger is on (``unsure``, :mod:`flexquant.policy.trigger`).

A policy file and a document stored in a merged checkpoint go through one validator: a file is first
turned into a plain document plus the line of each key, which the messages then name. What depends on the
model (its variants and layers) is checked by :func:`flexquant.policy.routes.build_route_table`. Nothing here
imports torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flexquant.documents.named_files import builtin_names, read_named
from flexquant.documents.yaml_document import Document, KeyPath, from_data, from_yaml, show
from flexquant.policy.moments import CALM, Moment, Span, spans
from flexquant.policy.pass_times import PassTimes, read_pass_times
from flexquant.policy.ranges import Bounds, LayerRange, are_covered, read_bounds, read_layers, read_variant
from flexquant.policy.trigger import Trigger, read_trigger

SCHEMA = "flexquant.policy/v1"
PACKAGE = "flexquant.policies"
MAX_RULES = 64
Phase = Literal["prefill", "decode", "mixed"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed")
"""Only prompt chunks; only sequences in generation; both."""

WHEN = ("phase", "batch_size", "tokens", "since_prompt", "unsure")
"""What a rule may ask for."""
IN_DECODE = {
    "batch_size": "use 'tokens' instead",
    "since_prompt": "add 'phase: decode'",
    "unsure": "add 'phase: decode'",
}
"""What only rules for decode may, and what to do in others."""

ACTIVATIONS = ("int8", "fp8")
"""What a derived variant may quantise the activations of an INT4 variant to, per token, while it runs."""


@dataclass(frozen=True)
class Rule:
    """Which forward passes a rule takes, and the variant that runs each of their layers."""

    phases: tuple[str, ...]
    tokens: Bounds
    batch_size: Bounds
    since_prompt: Bounds
    unsure: bool | None
    """None: whether the trigger is on or off."""
    variant: str
    layers: tuple[LayerRange, ...]
    place: str = field(compare=False)
    """File, line and key of ``use``, for messages."""

    def matches(self, phase: str, tokens: int, batch_size: int, moment: Moment = CALM) -> bool:
        """Whether the rule takes a pass of ``tokens`` tokens; the others matter in decode only."""
        return (
            phase in self.phases
            and tokens in self.tokens
            and batch_size in self.batch_size
            and moment.since_prompt in self.since_prompt
            and self.unsure in (None, moment.unsure)
        )

    @property
    def ranges(self) -> tuple[Bounds, ...]:
        return self.tokens, self.batch_size, self.since_prompt

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.variant, *(layers.variant for layers in self.layers)]))

    @property
    def plan_text(self) -> str:
        """The plan with its layers as written, e.g. ``w4a16+w8a8[0-3,-1]``."""
        exceptions: dict[str, list[str]] = {}
        for layers in self.layers:
            exceptions.setdefault(layers.variant, []).append(layers.text)
        return "+".join([self.variant, *(f"{name}[{','.join(texts)}]" for name, texts in exceptions.items())])


@dataclass(frozen=True)
class Derivation:
    """A variant with the weights of ``source``, one of the checkpoint's, and 8-bit activations."""

    source: str
    activations: str
    """One of :data:`ACTIVATIONS`."""
    place: str = field(compare=False)
    """File, line and key, for messages."""


@dataclass(frozen=True)
class Policy:
    """Validated rules; the first that matches decides, and the last matches everything."""

    name: str
    """Name of a built-in policy, else the source given or the path."""
    description: str
    rules: tuple[Rule, ...]
    derived: dict[str, Derivation]
    """By name, the variants that are computed from the checkpoint's."""
    trigger: Trigger | None
    """When passes are unsure, if rules ask for that."""
    measured: PassTimes | None
    """What the variants' passes took where the policy was tuned."""
    document: dict[str, Any]
    """The policy as plain JSON-able data, which :func:`parse_policy` reads back."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for rule in self.rules for name in rule.variants))

    def spans(self, phase: str) -> tuple[Span, ...]:
        """The moments that the rules tell apart: only decode has more than one."""
        if phase != "decode":
            return (Span(),)
        starts = {start for rule in self.rules for start in rule.since_prompt.starts()}
        return spans(starts, any(rule.unsure is not None for rule in self.rules))


def builtin_policies() -> list[str]:
    """Names of the policies that come with FlexQuant, sorted."""
    return builtin_names(PACKAGE)


def load_policy(name_or_path: str) -> Policy:
    """Load a built-in policy by name, or a policy file.

    What is a path :func:`~flexquant.documents.named_files.read_named` tells. Raises :class:`FlexQuantError`
    for an unknown name, an unreadable file, and a document that breaks the schema.
    """
    content, source = read_named(name_or_path, PACKAGE, "policy")
    return parse_policy_text(content, source, name_or_path)


def parse_policy_text(content: bytes, source: str, name: str) -> Policy:
    """Validate a policy given as YAML, or as JSON, which is YAML.

    ``source`` and the line open the message of the :class:`FlexQuantError` that bad syntax or a document
    breaking the schema raises; ``name`` becomes the policy's.
    """
    return _validate(from_yaml(content, source, "policy", ("schema", "rules")), name)


def parse_policy(document: dict[str, Any], source: str = "stored policy") -> Policy:
    """Validate a policy given as data, e.g. the one stored in a merged checkpoint.

    ``source`` becomes the policy's name and opens the message of the :class:`FlexQuantError` that a
    document breaking the schema raises.
    """
    return _validate(from_data(document, source, "policy"), source)


def _validate(document: Document, name: str) -> Policy:
    data = document.data
    document.check_keys(data, (), ("schema", "rules"), ("description", "derive", "experimental", "measured"))
    if data["schema"] != SCHEMA:
        document.fail(("schema",), f"is {show(data['schema'])}; this FlexQuant reads '{SCHEMA}' only")
    description = data.get("description", "")
    if not isinstance(description, str):
        document.fail(("description",), f"is {show(description)}; give text, in quotes if need be")
    entries = data["rules"]
    if not isinstance(entries, list) or not entries:
        document.fail(("rules",), f"is {show(entries)}; give a list of at least one rule")
    if len(entries) > MAX_RULES:
        document.fail(("rules",), f"has {len(entries)} rules; write at most {MAX_RULES}")
    rules: list[Rule] = []
    for i, entry in enumerate(entries):
        path = ("rules", i)
        is_last = i == len(entries) - 1
        document.check_keys(entry, path, ("use",), ("when",))
        if is_last and "when" in entry:
            document.fail(
                (*path, "when"),
                "is in the last rule, which must take every pass; remove it, or add a last rule",
            )
        if not is_last and "when" not in entry:
            document.fail(
                path, "has no 'when', so no later rule can match; add one, or move the rule to the end"
            )
        rule = _rule(entry, path, document)
        if not is_last and not _can_match(rule, rules):
            document.fail(
                path, "can never match, because earlier rules take all its passes; remove or move it"
            )
        rules.append(rule)
    derived = _derivations(data.get("derive", {}), document)
    used = {variant for rule in rules for variant in rule.variants}
    for variant in derived:
        if variant not in used:
            document.fail(("derive", variant), "is used by no rule; remove it, or use it in one")
    trigger = _trigger(rules, document)
    measured = read_pass_times(data["measured"], ("measured",), document) if "measured" in data else None
    return Policy(name, description, tuple(rules), derived, trigger, measured, data)


def _trigger(rules: Sequence[Rule], document: Document) -> Trigger | None:
    asking = [i for i, rule in enumerate(rules) if rule.unsure is not None]
    if "experimental" not in document.data:
        if asking:
            document.fail(
                ("rules", asking[0], "when", "unsure"),
                "needs the key 'experimental', with a trigger that says which passes are unsure; add it",
            )
        return None
    experimental = document.data["experimental"]
    document.check_keys(experimental, ("experimental",), ("trigger",))
    path = ("experimental", "trigger")
    trigger = read_trigger(experimental["trigger"], path, document)
    if not asking:
        document.fail(path, "is used by no rule; remove it, or ask for 'unsure: true' in one")
    return trigger


def _derivations(value: Any, document: Document) -> dict[str, Derivation]:
    if not isinstance(value, dict):
        document.fail(
            ("derive",), f"is {show(value)}; give a mapping such as w4a8: {{from: w4a16, activations: int8}}"
        )
    derived = {}
    for name, entry in value.items():
        path = ("derive", name)
        read_variant(name, path, document)
        document.check_keys(entry, path, ("from", "activations"), ())
        source = read_variant(entry["from"], (*path, "from"), document)
        if source in value:
            document.fail((*path, "from"), f"is '{source}', itself derived; name a variant of the checkpoint")
        activations = entry["activations"]
        if activations not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            document.fail((*path, "activations"), f"is {show(activations)}; give one of {allowed}")
        derived[name] = Derivation(source, activations, document.place(path))
    return derived


def _rule(entry: dict[str, Any], path: KeyPath, document: Document) -> Rule:
    phases: tuple[str, ...] = PHASES
    ranges = {"tokens": Bounds(), "batch_size": Bounds(), "since_prompt": Bounds()}
    unsure = None
    if "when" in entry:
        when, when_path = entry["when"], (*path, "when")
        document.check_keys(when, when_path, (), WHEN)
        if not when:
            document.fail(when_path, f"is empty; give at least one of {', '.join(WHEN)}")
        if "phase" in when:
            phases = _phases(when["phase"], (*when_path, "phase"), document)
        for key in ranges:
            if key in when:
                ranges[key] = read_bounds(when[key], (*when_path, key), document)
        if "unsure" in when:
            unsure = when["unsure"]
            if not isinstance(unsure, bool):
                document.fail((*when_path, "unsure"), f"is {show(unsure)}; give true or false")
        for key, advice in IN_DECODE.items():
            if key in when and phases != ("decode",):
                document.fail(
                    (*when_path, key),
                    f"is for a rule with 'phase: decode' only, but this one has {', '.join(phases)}; "
                    f"{advice}",
                )
    use, use_path = entry["use"], (*path, "use")
    layers: tuple[LayerRange, ...] = ()
    if not isinstance(use, dict):
        variant, place = read_variant(use, use_path, document), document.place(use_path)
    else:
        document.check_keys(use, use_path, ("default", "layers"), ())
        variant = read_variant(use["default"], (*use_path, "default"), document)
        layers = read_layers(use["layers"], (*use_path, "layers"), document)
        place = document.place((*use_path, "default"))
    return Rule(phases, **ranges, unsure=unsure, variant=variant, layers=layers, place=place)


def _phases(value: Any, path: KeyPath, document: Document) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if not names or any(name not in PHASES for name in names):
        document.fail(path, f"is {show(value)}; give one of {', '.join(PHASES)}, or a list of them")
    return tuple(phase for phase in PHASES if phase in names)


def _can_match(rule: Rule, earlier: Sequence[Rule]) -> bool:
    """Whether some pass reaches the rule."""
    states = (False, True) if rule.unsure is None else (rule.unsure,)
    return not all(
        are_covered(
            rule.ranges, [r.ranges for r in earlier if phase in r.phases and r.unsure in (None, state)]
        )
        for phase in rule.phases
        for state in states
    )
