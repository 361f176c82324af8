# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""List the keys of a config that the installed vLLM's sources read, by file and by architecture.

``python -m tests.read_keys`` writes ``merge/read_keys.json``.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path

import transformers
import vllm
from vllm.config import VllmConfig
from vllm.model_executor.models.registry import ModelRegistry

from flexquant.checkpoint.merged_config import VISION_ARCHITECTURES
from flexquant.merge.same_model import READ_KEYS

VLLM = Path(vllm.__path__[0])
MODELS = VLLM / "model_executor/models"
STATES = VLLM / "model_executor/layers/mamba"
OUTCOMES = Path(__file__).parent / "architectures/results.json"
A_CONFIG = re.compile(r"(^|_)(config|cfg)$")
"""Matches the name of a config in a model's file, but for VLLMS."""
VLLMS = {"vllm_config", "quant_config", *VllmConfig.__dataclass_fields__}
HF_CONFIG = re.compile(r"^(hf|hf_text|text|pretrained)_config$")
"""Matches the name of a model's config in a file that has other configs too."""
OF_ALL = ("adapters", "config", "interfaces", "interfaces_base", "utils", "vision")
"""Files beside the models' that vLLM runs for every model."""
Keys = dict[str, list[object]]
"""Key -> what the readers take for an absent one, where that is a constant."""


def keys_read(path: Path, name: re.Pattern[str] = A_CONFIG) -> Keys:
    """Return the keys that a file reads of configs by such a name, and those it could read by a variable."""
    found: Keys = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and _is_config(node.value, name):
            found.setdefault(node.attr, [])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            owner, key, *default = node.args
            if _is_config(owner, name) and isinstance(key, ast.Constant):
                known = found.setdefault(str(key.value), [])
                known += [d.value for d in default if isinstance(d, ast.Constant) and d.value not in known]
        elif isinstance(node, ast.FunctionDef) and _reads_by_variable(node, name):
            for text in {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}:
                if isinstance(text, str) and text.isidentifier():
                    found.setdefault(text, [])
    return {key: found[key] for key in sorted(found)}


def _is_config(node: ast.expr, name: re.Pattern[str]) -> bool:
    of_call = node.func if isinstance(node, ast.Call) else node  # config.get_text_config()
    called = getattr(of_call, "attr", getattr(of_call, "id", ""))
    return bool(name.search(called)) and called not in VLLMS


def _reads_by_variable(function: ast.FunctionDef, name: re.Pattern[str]) -> bool:
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call) and len(node.args) > 1)
    return any(
        getattr(call.func, "id", "") in ("getattr", "hasattr", "getattr_iter")
        and _is_config(call.args[0], name)
        and not isinstance(call.args[1], ast.Constant)
        for call in calls
    )


def merged(read: Iterable[Keys]) -> Keys:
    together: Keys = {}
    for keys in read:
        for key, defaults in keys.items():
            known = together.setdefault(key, [])
            known += [default for default in defaults if default not in known]
    return {key: together[key] for key in sorted(together)}


def files_of(architecture: str) -> list[Path]:
    """Return the files of a model's code: its module, and the other models' that it imports or names."""
    module = ModelRegistry.models[architecture].module_name.rpartition(".")[2]
    if module == "transformers":
        return [*(MODELS / module).glob("*.py"), Path(inspect.getfile(getattr(transformers, architecture)))]
    found: list[Path] = []
    waiting = [MODELS / f"{module}.py"]
    while waiting:
        path = waiting.pop()
        if path in found or path.parent == MODELS and path.stem in OF_ALL:
            continue
        found.append(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                waiting += _imported(path, node)
            elif isinstance(node, ast.Constant) and node.value in ModelRegistry.models:
                waiting += files_of(str(node.value))
    return sorted(found)


def _imported(path: Path, node: ast.ImportFrom) -> list[Path]:
    """Return the files of models, and of layers that read configs, that a statement in a file imports."""
    start = path.parents[node.level - 1] if node.level else VLLM.parent
    module = start.joinpath(*(node.module or "").split("."))
    inside = ("__init__", *(alias.name for alias in node.names))
    files = [module.with_suffix(".py"), *(module / f"{name}.py" for name in inside)]
    return [file for file in files if file.is_file() and {MODELS, STATES} & set(file.parents)]


def served() -> list[str]:
    outcomes = json.loads(OUTCOMES.read_text())["architectures"]
    text = [name for name, found in outcomes.items() if found["outcome"] == "served"]
    return sorted({*text, *VISION_ARCHITECTURES})


def table() -> dict[str, dict[str, object]]:
    """Return what the installed vLLM reads of every model and in each file, and the architectures' files."""
    parsing = [VLLM / f"transformers_utils/{name}.py" for name in ("config", "model_arch_config_convertor")]
    elsewhere = [path for path in VLLM.rglob("*.py") if MODELS not in path.parents]
    elsewhere += [MODELS / f"{name}.py" for name in OF_ALL]
    of_all = [keys_read(path, HF_CONFIG) for path in elsewhere]
    files = {architecture: files_of(architecture) for architecture in served()}
    read = {path: keys for path in {*sum(files.values(), [])} if (keys := keys_read(path))}
    names = {path: "/".join(path.with_suffix("").parts[-2:]) for path in sorted(read)}
    return {
        "of all": merged([*of_all, *map(keys_read, parsing)]),
        "files": {name: read[path] for path, name in names.items()},
        "architectures": {
            architecture: [names[path] for path in paths if path in names]
            for architecture, paths in files.items()
        },
    }


if __name__ == "__main__":
    lines = [
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in of.items())
        + "\n}"
        for part, of in table().items()
    ]
    READ_KEYS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
