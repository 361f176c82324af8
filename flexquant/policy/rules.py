# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a policy, a YAML document of schema ``flexquant.policy/v1``, and choose among several.

:mod:`flexquant.policy.schema` checks each key of the document, this module what rules mean together, and
:mod:`flexquant.policy.routes` what depends on the model. Nothing in this room imports torch or vLLM.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents import yaml_document
from flexquant.errors import FlexQuantError, UsageError
from flexquant.policy.pass_times import PassTimes
from flexquant.policy.schema import SCHEMA, Bounds, Derivation, Head, PolicySection, Rule

PACKAGE = "flexquant.policies"
DEFAULT_POLICY = "phase-batch"
"""Built-in policy that is used if neither the user nor the checkpoint has one."""
STORED = "stored"
"""Name of a merged checkpoint's own policy in commands and results."""
STORED_SOURCE = "the checkpoint's policy"
"""Name of the checkpoint's own policy in messages."""


@dataclass(frozen=True)
class Policy:
    """Validated rules; the first that matches a pass decides, and the last matches every pass."""

    name: str
    """Name of a built-in policy, path of a file, or the given source."""
    description: str
    rules: tuple[Rule, ...]
    derived: Mapping[str, Derivation]
    """Name -> derivation of a variant that is computed from a checkpoint's variant."""
    head: Head
    """Precision of the lm_head, in every plan."""
    measured: PassTimes | None
    """Times of the variants' passes on the machine on which the policy was tuned."""
    document: JsonObject
    """The policy as plain JSON-able data, which :func:`parse_policy` reads back."""
    place: Callable[[yaml_document.KeyPath], str] = field(compare=False)
    """Returns the file, line and key of a path in the document, for messages."""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for rule in self.rules for name in rule.variants))


def source_of(variant: str, derived: Mapping[str, Derivation]) -> str:
    """Return the checkpoint's variant whose weights a variant has: itself, unless it is derived."""
    return derived[variant].source if variant in derived else variant


def builtin_policies() -> list[str]:
    """Return the sorted names of the policies that come with FlexQuant."""
    return yaml_document.builtin_names(PACKAGE)


def load_policy(name_or_path: str) -> Policy:
    """Load a policy by built-in name or path; raise :class:`FlexQuantError` if it is unknown or wrong."""
    content, source = yaml_document.read_named(name_or_path, PACKAGE, "policy")
    return parse_policy_text(content, source, name_or_path)


def parse_policy_text(content: bytes, source: str, name: str) -> Policy:
    """Validate YAML or JSON under a ``name``; :class:`FlexQuantError` begins with ``source`` and line."""
    return _validate(yaml_document.from_yaml(content, source, "policy", ("schema", "rules")), name)


def parse_policy(document: JsonObject, source: str) -> Policy:
    """Validate a policy given as data, called ``source``; raise :class:`FlexQuantError` if it is wrong."""
    return _validate(yaml_document.from_data(document, source, "policy"), source)


def choose_policy(given: str | None = None, stored: JsonObject | None = None) -> Policy:
    """Return ``given`` (a name or path), else the document ``stored`` in a checkpoint, else the default."""
    if given is None and stored is not None:
        return parse_policy(stored, STORED_SOURCE)
    return load_policy(DEFAULT_POLICY if given is None else given)


def default_name(stored: JsonObject | None) -> str:
    """Return the name of serving's default policy for :func:`find_policies`."""
    return DEFAULT_POLICY if stored is None else STORED


def find_policies(
    names: Sequence[str],
    variants: Collection[str],
    folder: str | Path | None = None,
    stored: JsonObject | None = None,
) -> dict[str, Policy]:
    """Return the policies with the given names, keyed by these; raise FlexQuantError for unknown or repeated.

    They are of ``variants`` (for all passes), built in, files (named by their last part) or ``stored``.
    """
    policies: dict[str, Policy] = {}
    for text in dict.fromkeys(names):
        name, policy = _find(text, variants, folder, stored)
        if name in policies:
            raise UsageError(f"two policies are named '{name}'; rename one of the files")
        policies[name] = policy
    return policies


def _find(
    text: str, variants: Collection[str], folder: str | Path | None, stored: JsonObject | None
) -> tuple[str, Policy]:
    if text in variants:
        return text, parse_policy({"schema": SCHEMA, "rules": [{"use": text}]}, text)
    if text == STORED and folder is not None:
        if stored is None:
            raise FlexQuantError(f"{folder} stores no policy; its default is the built-in '{DEFAULT_POLICY}'")
        return STORED, parse_policy(stored, STORED_SOURCE)
    try:
        policy = load_policy(text)
    except FlexQuantError as e:
        raise FlexQuantError(f"{e}; or a variant of the checkpoint: {', '.join(variants)}") from e
    return text if text in builtin_policies() else Path(text).name, policy


def with_derivations(document: JsonObject, policies: Iterable[Policy]) -> JsonObject:
    """Return the document with the derivations that its rules use: those of ``policies``, else its own."""
    known: JsonObject = {}
    for one in (document, *(policy.document for policy in policies)):
        known |= one.get("derive", {})
    used: set[str] = set()
    for rule in document["rules"]:
        use = rule["use"] if isinstance(rule["use"], dict) else {"default": rule["use"]}
        used |= {use["default"], *use.get("layers", {}).values()}
    derived = {name: how for name, how in known.items() if name in used}
    rules = {key: document[key] for key in ("rules", "measured") if key in document}
    others = {key: value for key, value in document.items() if key not in (*rules, "derive")}
    return {**others, **({"derive": derived} if derived else {}), **rules}


def _validate(document: yaml_document.Document, name: str) -> Policy:
    found = yaml_document.read_section(PolicySection, document)
    *early, last = enumerate(found.rules)
    for i, rule in early:
        if "when" not in rule.model_fields_set:
            problem = "has no 'when', so no later rule can match; add one, or move the rule to the end"
            document.fail(("rules", i), problem)
        if not _can_match(rule, found.rules[:i]):
            problem = "can never match, because earlier rules take all its passes; remove or move it"
            document.fail(("rules", i), problem)
    if "when" in last[1].model_fields_set:
        problem = "is in the last rule, which must take every pass; remove it, or add a last rule"
        document.fail(("rules", last[0], "when"), problem)
    for variant, how in found.derive.items():
        if how.source in found.derive:
            problem = f"is '{how.source}', itself derived; name a variant of the checkpoint"
            document.fail(("derive", variant, "from"), problem)
        if how.is_one_copy and how.activations != how.weights:
            problem = f"is '{how.activations}'; {how.weights.upper()} weights need {how.weights}"
            document.fail(("derive", variant, "activations"), problem)
        if not any(variant in rule.variants for rule in found.rules):
            document.fail(("derive", variant), "is used by no rule; remove it, or use it in one")
    return Policy(
        name=name,
        description=found.description,
        rules=tuple(found.rules),
        derived=found.derive,
        head=found.head,
        measured=found.measured,
        document=document.data,
        place=document.place,
    )


def _can_match(rule: Rule, earlier: Sequence[Rule]) -> bool:
    """Whether some pass reaches the rule; only sizes where a range begins or has just ended need a test."""
    for phase in rule.when.phases:
        in_phase = [other.when for other in earlier if phase in other.when.phases]
        for tokens in _starts(rule.when.tokens, [other.tokens for other in in_phase]):
            batches = [other.batch_size for other in in_phase if tokens in other.tokens]
            for batch_size in _starts(rule.when.batch_size, batches):
                if not any(batch_size in other for other in batches):
                    return True
    return False


def _starts(bounds: Bounds, others: Sequence[Bounds]) -> set[int]:
    return {bounds.min} | {start for other in others for start in other.starts() if start in bounds}
