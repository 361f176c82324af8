# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What Triton makes of the kernel of one copy for GPUs that this machine lacks: its PTX is read, not run."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import pytest

from tests import programs

CAPABILITIES = (80, 90)
THREADS = 64
WEIGHTS = 64 * 128
"""Weights that one program of the kernel writes for groups of 128 inputs."""
# vLLM for CPUs puts stand-ins in the place of Triton, whose compiler needs no GPU.
COMPILE = """
import json
import triton, triton.language
from vllm import triton_utils
triton_utils.triton, triton_utils.tl = triton, triton.language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flexquant.serving.worker.one_copy.gpu_kernel import _int4_to_8_bit as kernel, compile_options

names = kernel.arg_names
types = dict(packed="*i32", scale="*bf16", zero="*i8", row="*fp32", column="*fp32", difference="*i32")
types |= {"out": "*i8"} | dict.fromkeys(("outputs", "inputs", "group", "integer_bits"), "i32")
found = {}
for capability in CAPABILITIES:
    for zero, nested in ((False, False), (True, False), (False, True), (True, True)):
        constants = dict(is_grouped=True, has_zero=zero, is_nested=nested, is_integer=True)
        constants |= dict(outputs_first=True, tiles=8)
        source = ASTSource(
            kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
        )
        target = GPUTarget("cuda", capability, 32)
        found[f"{capability} {zero} {nested}"] = triton.compile(source, target, compile_options(8)).asm["ptx"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def instructions() -> dict[str, Counter[str]]:
    """Return capability, zero points, nested -> instruction -> how often it is in the PTX."""
    program = COMPILE.replace("CAPABILITIES", str(CAPABILITIES))
    ptx = json.loads(programs.run([sys.executable, "-c", program], timeout=300).stdout.splitlines()[-1])
    pattern = re.compile(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.:]*)\s", re.MULTILINE)
    return {name: Counter(pattern.findall(text)) for name, text in ptx.items()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_rounds_as_its_reference_and_reads_each_word_once(instructions, capability, zeros, nested):
    found = instructions[f"{capability} {zeros} {nested}"]
    divisions = {name for name in found if name.startswith("div.") and name.endswith("f32")}
    assert not divisions, "one takes as long as several weights"
    assert not any(name.startswith("fma.") for name in found), (
        "it rounds once where the reference rounds twice"
    )
    # A word has 8 weights, and 128 bits have 4 words, or 16 weights in 8 bit.
    planes, most = (2, 17) if nested else (1, 11)
    assert found["ld.global.v4.b32"] * THREADS * 32 == planes * WEIGHTS
    assert {name for name in found if name.startswith("st.global")} == {"st.global.v4.b32"}
    assert found["st.global.v4.b32"] * THREADS * 16 == WEIGHTS
    assert found.total() * THREADS < most * WEIGHTS, f"more than {most} instructions a weight"
