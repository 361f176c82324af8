# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compares ``flexquant.serving.vllm_names`` with the source of a vLLM, which is parsed and not imported."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexquant.serving.vllm_names import NAMES, PUBLIC, Names

TABLES = (*NAMES, *(Names(module, "", dict.fromkeys(names, "")) for module, names in PUBLIC.items()))
"""All names that FlexQuant uses, the public ones included."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Problem:
    """A name that this vLLM does not have as the tables say."""

    name: str
    """The module, and the entry without its parameters."""
    kind: Literal["missing", "moved", "changed"]
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


class Module:
    """What one file of vLLM defines, imports and speaks of."""

    def __init__(self, name: str, file: Path) -> None:
        self.name = name
        self.is_package = file.name == "__init__.py"
        self.tree = ast.parse(file.read_text(encoding="utf-8"))
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        """Name here -> the module, and the name there."""
        self.stars: list[str] = []
        """Modules from which everything is imported."""
        for statement in _statements(self.tree.body):
            if isinstance(statement, ast.ImportFrom):
                origin = self._absolute(statement)
                self.stars += [origin for alias in statement.names if alias.name == "*"]
                for alias in statement.names:
                    self.imports[alias.asname or alias.name] = origin, alias.name
            else:
                self.definitions |= dict.fromkeys(_names_set_by(statement), statement)

    def _absolute(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        up = statement.level - self.is_package
        package = self.name.split(".")[: -up or None]
        return ".".join([*package, *filter(None, [statement.module])])

    @functools.cached_property
    def mentioned(self) -> set[str]:
        """Return the names, strings, and attributes (``a.b.c``, ``b.c`` and ``c``) that occur in the code."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.Attribute):
                dotted: ast.expr = node
                path = ""
                while isinstance(dotted, ast.Attribute):
                    path = f"{dotted.attr}.{path}" if path else dotted.attr
                    found.add(path)
                    dotted = dotted.value
                if isinstance(dotted, ast.Name):
                    found.add(f"{dotted.id}.{path}")
            elif isinstance(node, ast.Name | ast.alias):
                found.add(node.id if isinstance(node, ast.Name) else node.name)
        return found


class Source:
    """The source of one vLLM."""

    def __init__(self, site: Path) -> None:
        """``site``: the folder that holds the folder ``vllm``."""
        self._site = site
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self._site.joinpath(*name.split("."))
            files = [f for f in (path / "__init__.py", path.with_suffix(".py")) if f.is_file()]
            self._modules[name] = Module(name, files[0]) if files else None
        return self._modules[name]

    def find(self, module_name: str, name: str) -> tuple[Module, ast.AST] | None:
        """Return the definition of a module's name, and the module that it is in, imports followed."""
        module = self.module(module_name)
        if module is None:
            return None
        if name in module.definitions:
            return module, module.definitions[name]
        if name in module.imports and module.imports[name] != (module_name, name):
            return self.find(*module.imports[name])
        if found := next(filter(None, (self.find(star, name) for star in module.stars)), None):
            return found
        submodule = self.module(f"{module_name}.{name}")
        return (submodule, submodule.tree) if submodule is not None else None

    def lineage(self, module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
        """Yield a class and its base classes, as far as they are vLLM's own, each with its module."""
        yield module, node
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(module.name, name.id) if isinstance(name, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self.lineage(found[0], found[1])

    def places(self, name: str) -> list[str]:
        """Return the modules that define this name."""
        definition = re.compile(rf"^(?:class |(?:async )?def |){name}\b *[(:=]", re.MULTILINE)
        files = sorted((self._site / "vllm").rglob("*.py"))
        found = [f for f in files if definition.search(f.read_text(encoding="utf-8"))]
        return [".".join(f.relative_to(self._site).with_suffix("").parts) for f in found]


def check(source: Source, tables: Iterable[Names], version: str) -> list[Problem]:
    """Return what is wrong with the tables for this source, which is vLLM ``version``.

    A name out of its range of versions must not be there.
    """
    problems: list[Problem] = []
    for names in tables:
        found = [
            *(p for entry in names.uses for p in _check_entry(source, names.module, entry)),
            *(p for entry in names.overrides for p in _check_entry(source, names.module, entry, True)),
            *_check_abstract(source, names),
            *_check_mentions(source, names),
        ]
        if in_range(names, version):
            problems += found
            continue
        missing = {problem.name for problem in found}
        for entry in entries(names):
            if (name := title(names, entry)) not in missing:
                problems.append(Problem(name, "changed", "is there, although the tables say that it is not"))
    return problems


def in_range(names: Names, version: str) -> bool:
    major, minor = map(int, version.split(".")[:2])
    return (names.since or (0, 0)) <= (major, minor) <= (names.until or (major, minor))


def entries(names: Names) -> list[str]:
    return [*names.uses, *names.overrides, *names.mentions]


def title(names: Names, entry: str) -> str:
    """Return a name's module and the name without parameters."""
    return f"{names.module}.{entry.partition('(')[0]}"


def find_entry(source: Source, module: str, path: str) -> tuple[Module, ast.AST] | None:
    """Return the definition of ``Name`` or ``Class.attribute``, and the module that it is in."""
    name, _, member = path.partition(".")
    found = source.find(module, name)
    if found is None or not member:
        return found
    if isinstance(found[1], ast.ClassDef):
        for owner, node in source.lineage(found[0], found[1]):
            if (definition := _member(node, member)) is not None:
                return owner, definition
    return None


def parameters(node: ast.AST, bound: bool) -> str | None:
    """Return the parameters of a function as they are written, types and defaults left out."""
    if not isinstance(node, Function):
        return None
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][int(bound) :]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] if arguments.kwonlyargs else []
    names += [a.arg for a in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(names)


def is_bound(node: ast.AST, path: str) -> bool:
    """Return whether a function's first parameter is its object or class."""
    return "." in path and isinstance(node, Function) and "staticmethod" not in _decorators(node)


def _check_entry(source: Source, module: str, entry: str, overridden: bool = False) -> Iterator[Problem]:
    path, called, passed = entry.partition("(")
    found = find_entry(source, module, path)
    if found is None:
        name = path.partition(".")[0]
        places = [] if source.find(module, name) else source.places(name)
        moved = f"is gone; '{name}' is in {', '.join(places)}" if places else "is gone"
        yield Problem(f"{module}.{path}", "moved" if places else "missing", moved)
        return
    node = found[1]
    if not called:
        return
    if not isinstance(node, Function):
        yield Problem(f"{module}.{path}", "changed", "is no function any more")
        return
    call = ast.parse(f"def f({passed}: ...").body[0]
    assert isinstance(call, ast.FunctionDef)
    for what in _compare(call.args, node.args, is_bound(node, path), overridden):
        yield Problem(f"{module}.{path}", "changed", what)


def _check_abstract(source: Source, names: Names) -> Iterator[Problem]:
    overridden = {entry.partition("(")[0] for entry in names.overrides}
    for owner in {path.partition(".")[0] for path in overridden}:
        for method in sorted(_abstract(source, names.module, owner)):
            if f"{owner}.{method}" not in overridden:
                what = "is abstract, and FlexQuant does not define it"
                yield Problem(f"{names.module}.{owner}.{method}", "changed", what)


def _check_mentions(source: Source, names: Names) -> Iterator[Problem]:
    module = source.module(names.module)
    for entry in names.mentions:
        if module is None or entry not in module.mentioned:
            yield Problem(title(names, entry), "missing", "is not mentioned in the module")


def _compare(passed: ast.arguments, taken: ast.arguments, bound: bool, overridden: bool) -> Iterator[str]:
    """Yield what does not fit between the parameters that FlexQuant passes and those that vLLM takes."""
    positional = [a.arg for a in (*taken.posonlyargs, *taken.args)][int(bound) :]
    optional = set(positional[len(positional) - len(taken.defaults) :] if taken.defaults else ())
    keyword = {a.arg: d is not None for a, d in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)}
    optional |= {name for name, has_default in keyword.items() if has_default}
    by_position, by_keyword = [a.arg for a in passed.args], [a.arg for a in passed.kwonlyargs]
    if taken.vararg is None and by_position != positional[: len(by_position)]:
        yield f"takes ({', '.join(positional)}) by position, not ({', '.join(by_position)})"
    for name in by_keyword:
        if name not in (*positional, *keyword) and taken.kwarg is None:
            yield f"has no parameter '{name}'"
    for name in (*positional, *keyword):
        if name not in (*by_position, *by_keyword) and (overridden or name not in optional):
            yield f"is passed '{name}' too" if overridden else f"requires '{name}'"


def _member(node: ast.ClassDef, name: str) -> ast.stmt | None:
    """Return what a class's body defines or its methods set under this name."""
    for statement in _statements(node.body):
        if name in _names_set_by(statement):
            return statement
    for method in filter(lambda statement: isinstance(statement, Function), node.body):
        for statement in ast.walk(method):
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if f"self.{name}" in map(ast.unparse, targets):
                    return statement
    return None


def _abstract(source: Source, module: str, name: str) -> set[str]:
    """Return the methods that a class leaves to its subclasses."""
    found = source.find(module, name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return set()
    abstract: Mapping[str, bool] = {}
    for _, node in source.lineage(found[0], found[1]):
        methods = [statement for statement in node.body if isinstance(statement, Function)]
        abstract = {m.name: "abstractmethod" in _decorators(m) for m in methods} | abstract
    return {method for method, is_abstract in abstract.items() if is_abstract}


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those under ``if``, ``try`` and ``with``."""
    for statement in body:
        if isinstance(statement, ast.If | ast.With):
            yield from _statements([*statement.body, *getattr(statement, "orelse", [])])
        elif isinstance(statement, ast.Try):
            handlers = [s for handler in statement.handlers for s in handler.body]
            yield from _statements([*statement.body, *handlers, *statement.orelse])
        else:
            yield statement


def _names_set_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, Function | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [
            node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)
        ]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []
