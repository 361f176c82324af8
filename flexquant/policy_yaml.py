# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policy documents as plain data that still knows the file and line of each key, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from flexquant.errors import FlexQuantError

KeyPath = tuple[str | int, ...]
"""Where a value is: keys of mappings and indices of lists, from the top."""


@dataclass(frozen=True)
class Document:
    """Plain data, JSON-able once validated, with text keys; ``lines`` is empty where it came from no file."""

    data: Any
    source: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Name a place, e.g. ``policy.yaml, line 4: rules[0].when``."""
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        line = f", line {self.lines[path]}" if path in self.lines else ""
        return f"{self.source}{line}: {key or 'the policy'}"

    def fail(self, path: KeyPath, problem: str) -> NoReturn:
        raise FlexQuantError(f"{self.place(path)} {problem}")


def from_data(data: Any, source: str) -> Document:
    """Copy nested dicts and lists, keys as text."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): copy(item) for key, item in value.items()}
        return [copy(item) for item in value] if isinstance(value, list) else value

    return Document(copy(data), source)


def from_yaml(text: bytes, source: str) -> Document:
    """Parse YAML; raise :class:`FlexQuantError` for bad syntax, duplicate keys and an empty file."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise FlexQuantError(
                f"{source}, line 1: the policy is empty; write the keys 'schema' and 'rules'"
            )
        return _read(loader, root, source)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        problem = ", ".join(part for part in (e.context, e.problem) if part)
        raise FlexQuantError(f"{place}: not valid YAML ({problem}); correct the syntax") from e
    except yaml.YAMLError as e:
        problem = " ".join(str(e).split())
        raise FlexQuantError(f"{source}: not valid YAML ({problem}); save it as UTF-8 text") from e
    except RecursionError as e:
        raise FlexQuantError(
            f"{source}: nested too deeply, or an alias that contains itself; write it flat"
        ) from e


def _read(loader: yaml.SafeLoader, root: yaml.Node, source: str) -> Document:
    lines: dict[KeyPath, int] = {}
    document = Document(None, source, lines)

    def read(node: yaml.Node, path: KeyPath) -> Any:
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [read(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return read_mapping(node, path)
        try:
            return loader.construct_object(node)
        except ValueError as e:
            document.fail(path, f"is '{node.value}', which YAML cannot read ({e}); correct or quote it")

    def read_mapping(node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise FlexQuantError(f"{source}, line {line}: a key is a list or mapping; write text instead")
            key = key_node.value
            if key in mapping:
                first, lines[(*path, key)] = lines[(*path, key)], line
                document.fail((*path, key), f"was given in line {first} already; remove one of the two")
            lines[(*path, key)] = line
            mapping[key] = read(value_node, (*path, key))
        return mapping

    return Document(read(root, ()), source, lines)
