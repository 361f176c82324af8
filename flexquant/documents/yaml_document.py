# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read policies, recipes and devices: YAML files, by name or path, and the pydantic models that check them.

A mapping of a document is a :class:`Section`, whose fields are the keys. Messages name the file and line of a
key, what is allowed and what to do. The same models make the JSON Schema for editors.
"""

import importlib.resources
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from flexquant.documents import MAX_DEPTH
from flexquant.errors import FlexQuantError, said_by

MAX_VALUES = 100_000
"""Largest number of values in a document, aliases expanded; a few lines of them could fill any memory."""
MAX_BYTES = 1_000_000
"""Largest size of a document; reading it takes up to half a minute."""
MAX_KEY = 200
"""Largest number of characters in a key; keys that name layers and sizes are read as numbers."""
OLD_NUMBER = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""Matches numbers in base 8 or 60, which only YAML 1.1 reads as such."""
KeyPath = tuple[str | int, ...]
"""Path of a value: the keys of mappings and indices of lists from the top."""
YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Document:
    """Plain data with text keys; it is JSON-able once it is validated."""

    data: Any
    source: str
    kind: str
    """Name of the kind of document, e.g. policy or recipe."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line of each key and value, from 1; empty for a document that came from no file."""

    def place(self, path: KeyPath) -> str:
        """Return a place for messages, e.g. ``policy.yaml, line 4: rules[0].when``."""
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        line = f", line {self.lines[path]}" if path in self.lines else ""
        return f"{self.source}{line}: {key or f'the {self.kind}'}"

    def fail(self, path: KeyPath, problem: str) -> NoReturn:
        raise FlexQuantError(f"{self.place(path)} {problem}")


def show(value: object) -> str:
    """Return a value for messages: JSON, cut at 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def from_data(data: object, source: str, kind: str) -> Document:
    """Copy nested dicts and lists, with keys as text; raise FlexQuantError for a key that is too long."""

    def copy(value: object) -> object:
        if isinstance(value, dict):
            return {_key(str(key), source): copy(item) for key, item in value.items()}
        return [copy(item) for item in value] if isinstance(value, list) else value

    return Document(copy(data), source, kind)


def from_yaml(text: bytes, source: str, kind: str, keys: Sequence[str]) -> Document:
    """Parse YAML; raise FlexQuantError for bad syntax, duplicate keys, and large and empty files."""
    if len(text) > MAX_BYTES:
        raise FlexQuantError(f"{source}: the {kind} has {len(text)} bytes; write one of at most {MAX_BYTES}")
    try:
        loader = _DatesAsText(text)
        root = loader.get_single_node()
        if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
            needed = " and ".join(f"'{key}'" for key in keys)
            raise FlexQuantError(f"{source}, line 1: the {kind} is empty; write the keys {needed}")
        return _read(loader, root, source, kind)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        problem = ", ".join(part for part in (e.context, e.problem) if part)
        raise FlexQuantError(f"{place}: not valid YAML ({problem}); correct the syntax") from e
    except yaml.YAMLError as e:
        raise FlexQuantError(f"{source}: not valid YAML ({said_by(e)}); save it as UTF-8 text") from e
    except RecursionError as e:
        problem = "nested too deeply, or an alias that contains itself"
        raise FlexQuantError(f"{source}: {problem}; write it flat") from e


class _DatesAsText(yaml.SafeLoader):
    """Loads dates as text, as JSON does; lm-format-enforcer changes how yaml.SafeLoader itself does."""

    yaml_constructors = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_str,
    }


def to_yaml(data: Mapping[str, object], comments: Sequence[str] | None = None) -> str:
    """Return YAML that :func:`from_yaml` reads back; with ``comments`` first, flat lists are on one line."""
    style = False if comments is None else None
    return "".join(f"# {line}".rstrip() + "\n" for line in comments or ()) + yaml.dump(
        data, Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True, default_flow_style=style
    )


class _PlainDumper(yaml.SafeDumper):
    """Writes an object that occurs twice in full both times, without anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _read(loader: yaml.SafeLoader, root: yaml.Node, source: str, kind: str) -> Document:
    lines: dict[KeyPath, int] = {}
    document = Document(None, source, kind, lines)
    values = 0

    def read(node: yaml.Node, path: KeyPath) -> object:
        nonlocal values
        values += 1
        if values > MAX_VALUES:
            most = f"{MAX_VALUES} values, aliases written out"
            document.fail((), f"holds more than {most}; write a smaller one")
        if len(path) > MAX_DEPTH:
            raise RecursionError
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [read(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return read_mapping(node, path)
        try:
            return _scalar(loader.construct_object(node), node.value)
        except ValueError as e:
            document.fail(path, f"is {node.value!r}, which cannot be read ({e}); correct or quote it")

    def read_mapping(node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            place = f"{source}, line {line}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise FlexQuantError(f"{place}: a key is a list or mapping; write text instead")
            try:
                key = _key(_whole(key_node.value), place)
            except ValueError as e:
                raise FlexQuantError(f"{place}: a key cannot be read ({e}); correct it") from e
            if key in mapping:
                first, lines[(*path, key)] = lines[(*path, key)], line
                document.fail((*path, key), f"was given in line {first} already; remove one of the two")
            lines[(*path, key)] = line
            mapping[key] = read(value_node, (*path, key))
        return mapping

    return Document(read(root, ()), source, kind, lines)


def _key(key: str, place: str) -> str:
    if len(key) > MAX_KEY:
        raise FlexQuantError(f"{place}: a key has {len(key)} characters; write one of at most {MAX_KEY}")
    return key


def _scalar(value: object, written: str) -> object:
    """Return a value that a server's processes can send to each other; raise ValueError for others."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError("a number of more than 63 bit")
    if isinstance(value, int | float) and OLD_NUMBER.fullmatch(written):
        raise ValueError(f"YAML 1.1 takes it for {value}, to the base of 8 or 60")
    if isinstance(value, bytes):
        raise ValueError("JSON has no such value")
    return _whole(value) if isinstance(value, str) else value


def _whole(text: str) -> str:
    """Join the two surrogates that PyYAML leaves of a JSON escape; raise ValueError for one alone."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as e:
        raise ValueError("half of a character, the other half of which is missing") from e


def builtin_names(package: str) -> list[str]:
    """Return the sorted names of a package's YAML files."""
    files = (Path(file.name) for file in importlib.resources.files(package).iterdir())
    return sorted(file.stem for file in files if file.suffix == YAML[0])


def read_named(name_or_path: str, package: str, kind: str) -> tuple[bytes, str]:
    """Return the content of a built-in or a file, and its name in messages; raise FlexQuantError for neither.

    What is no built-in's name is a path if it has a ``/`` or a suffix of YAML, or names an existing file.
    """
    builtins = builtin_names(package)
    if name_or_path in builtins:
        file = importlib.resources.files(package) / f"{name_or_path}{YAML[0]}"
        return file.read_bytes(), f"built-in {kind} {name_or_path}"
    path = Path(os.path.expanduser(name_or_path))
    known = ", ".join(builtins)
    if "/" not in name_or_path and path.suffix not in YAML and not path.is_file():
        advice = f"give one of them, or the path of a {kind} file (with a '/' or ending in {YAML[0]})"
        raise FlexQuantError(f"unknown {kind} '{name_or_path}': the built-in ones are {known}; {advice}")
    try:
        return path.read_bytes(), name_or_path
    except (OSError, ValueError) as e:
        problem = f"{name_or_path}: the {kind} file cannot be read ({getattr(e, 'strerror', e)}); give a path"
        raise FlexQuantError(f"{problem}, or one of the built-in ones {known}") from e


class Problem(ValueError):
    """A validator's error; ``at`` is the path from the validated value to the wrong place."""

    def __init__(self, text: str, at: Sequence[str | int] = ()) -> None:
        super().__init__(text)
        self.at = tuple(at)


def says(advice: str, whole: bool = False) -> WrapValidator:
    """Refuse a wrong value, or null, with the message ``is VALUE; ADVICE``.

    A problem inside of a value gets its own message, unless the advice is for the ``whole`` value.
    """

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            if value is not None:
                return handler(value)
        except ValidationError as e:
            own = [error for error in e.errors() if error["type"] == "value_error"]
            if not whole and (own or any(error["loc"] for error in e.errors())):
                raise
        raise Problem(f"is {show(value)}; {advice}")

    return WrapValidator(validate)


POSITIVE = "give a whole number of at least 1"
Positive = Annotated[int, Field(strict=True, ge=1), says(POSITIVE)]
OptionalPositive = Annotated[Positive | SkipJsonSchema[None], says(POSITIVE)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True), says("give a number of at least 0")]
Text = Annotated[str, Field(strict=True), says("give text, in quotes if need be")]
KEYS_AS_GIVEN = {"additionalProperties": False}
"""JSON Schema of a mapping whose keys must all match the pattern of its keys."""


class Section(BaseModel):
    """A mapping of a document, with all required keys and no unknown ones; excluded fields are no keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_by_name=True
    )

    refused: ClassVar[Mapping[str, str]] = {}
    """Unknown keys that are refused with a reason of their own, unless they are null."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: object) -> object:
        fields = {field.alias or name: field for name, field in cls.model_fields.items() if not field.exclude}
        required = [key for key, field in fields.items() if field.is_required()]
        allowed = ", ".join([*required, *(key for key in fields if key not in required)])
        if not isinstance(value, dict):
            raise Problem(f"is {show(value)}; give a mapping with the keys {allowed}")
        for key in value.keys() & cls.refused.keys():
            if value[key] is not None:
                raise Problem(f"is refused: {cls.refused[key]}", [key])
        for key in value:
            if key not in fields:
                raise Problem(f"is an unknown key; the allowed ones here are {allowed}", [key])
        for key in required:
            if key not in value:
                raise Problem(f"lacks the key '{key}'; add it (allowed here: {allowed})")
        return value


S = TypeVar("S", bound=Section)


def read_section(section: type[S], document: Document) -> S:
    """Return a document as a section; raise FlexQuantError for the first problem in it."""
    try:
        return section.model_validate(document.data)
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        found = error.get("ctx", {}).get("error")
        at = found.at if isinstance(found, Problem) else ()
        document.fail((*_path_in(document.data, error["loc"]), *at), str(found or error["msg"]))


def _path_in(value: object, loc: Sequence[str | int]) -> KeyPath:
    """Return the keys and indices in a location of pydantic, which also names branches of unions."""
    path: list[str | int] = []
    for part in loc:
        held = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(held, dict) and part in held:
            value = held[part]
            path.append(part)
    return tuple(path)
