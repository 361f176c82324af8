# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The plugin's manners: harmless where it is not wanted."""

import json
import os
import sys

import pytest

from tests import programs
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.oldest

ALL_PLUGINS_BUT_OURS = {"VLLM_PLUGINS": "lora_filesystem_resolver"}


def python(code: str, **environment: str) -> str:
    """Run ``code`` in an interpreter of its own and return the last line that it prints."""
    done = programs.run([sys.executable, "-c", code], timeout=300, environment={**os.environ, **environment})
    return done.stdout.strip().splitlines()[-1]


def test_register_imports_neither_torch_nor_vllm_by_itself():
    code = "import sys, flexquant; flexquant.register(); print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    assert python(code) == "[]"


def test_register_in_a_vllm_process_imports_no_model_and_registers_once_by_name():
    code = """
import sys, vllm
from vllm.engine.arg_utils import EngineArgs
before = set(sys.modules)
import flexquant
for _ in range(3):
    flexquant.register()
new = set(sys.modules) - before
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
print([m for m in new if m.startswith(('torch', 'flexquant.serving.worker'))
       or (m.startswith('vllm.model_executor.models.') and m.split('.')[-1] in ('llama', 'qwen2', 'gemma3'))],
      QUANTIZATION_METHODS.count('flexquant'), 'FlexQuantForCausalLM' in ModelRegistry.get_supported_archs())
"""
    assert python(code) == "[] 1 True"


def test_register_never_raises_and_says_why_it_failed():
    code = """
import logging, sys, types
sys.modules['vllm'] = types.ModuleType('vllm')
import flexquant
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger('vllm.flexquant').addHandler(handler)
flexquant.register()
print(len(records), records[0].getMessage())
"""
    assert python(code).startswith("1 FlexQuant could not register")


@pytest.mark.engine
@pytest.mark.full
def test_stock_models_are_served_as_without_the_plugin(tmp_path):
    folders = [str(make_checkpoint(tmp_path / str(scheme), "llama", scheme)) for scheme in (None, "w8a8")]
    code = f"""
from tests.integration.conftest import answers, engine
import json, sys
results = []
for folder in {folders!r}:
    with engine(folder, max_model_len=256) as llm:
        results.append(repr(answers(llm, ['hello world', 'abc'])))
print(json.dumps(['flexquant.serving.registration' in sys.modules, results]))
"""
    with_plugin, found = json.loads(python(code))
    without, stock = json.loads(python(code, **ALL_PLUGINS_BUT_OURS))
    assert (with_plugin, without) == (True, False)
    assert found == stock and len(set(found)) == len(folders)


def test_without_the_plugin_vllm_refuses_a_merged_checkpoint(tiny_merged):
    code = f"""
from vllm.engine.arg_utils import EngineArgs
try:
    EngineArgs(model={str(tiny_merged() / "merged")!r}).create_engine_config()
except Exception as e:
    print(str(e).replace(chr(10), ' '))
"""
    message = python(code, **ALL_PLUGINS_BUT_OURS)
    assert "FlexQuantForCausalLM" in message or "flexquant" in message
