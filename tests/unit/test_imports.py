# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints, policies and documents are read by processes that have neither torch nor vLLM loaded."""

from __future__ import annotations

import json
import sys

import pytest

from tests import programs

IMPORT_ALL = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
heavy = {}
for name in names:
    importlib.import_module(name)
    heavy |= {h: name for h in ("torch", "vllm", "transformers") if h in sys.modules and h not in heavy}
print(json.dumps([len(names), heavy]))
"""


@pytest.mark.parametrize("package", ["checkpoint", "policy", "documents"])
def test_no_module_imports_torch_or_vllm(package):
    command = [sys.executable, "-c", IMPORT_ALL, f"flexquant.{package}"]
    modules, heavy = json.loads(programs.run(command, timeout=120).stdout)
    assert modules > 2
    assert heavy == {}, "the first module that loads each"
