# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A linear of INT4 weights alone multiplies as one of the nearest INT8 weights; the kernel's PTX is read."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from flexquant.serving.kernels import cpu_loops, trial
from flexquant.serving.kernels.choice import possible_kernels
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.layers import kernel_of_layer
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.vllm_api import envs
from flexquant.serving.worker.one_copy import cpu as one_copy
from flexquant.serving.worker.one_copy.product import CHANNEL_SCALE, NESTED, ROW
from tests import programs
from tests.conftest import rest_full

pytest.importorskip("vllm")

INPUTS = 256
NARROW = 32 if hasattr(torch.ops._C, "cpu_gemm_wna16") else 16
SHAPES = {"whole blocks": 128, "a narrow block": 128 + NARROW}
"""PyTorch's blocks have 64 outputs with AVX512, which vLLM's kernel goes with, and else 32."""


def made(kind: Any, outputs: int, group: int, signs: float | None = 1.0, zeros: bool = False) -> tuple:
    """Return a kernel, its packed layer and weights, float64 [out, in]; ``signs`` None: scales of both."""
    torch.manual_seed(0)
    layer = {"inputs": INPUTS, "outputs": outputs, "group_size": group, "zero_points": zeros}
    linear = trial.new_layer({**layer, "dtype": "bfloat16"}, kind)
    kernel = kernel_of_layer(linear)
    linear.weight_scale.data *= torch.randn_like(linear.weight_scale).sign() if signs is None else signs
    codes = unpack_from_int32(linear.weight_packed.data, 4, torch.Size((outputs, INPUTS)))
    width = INPUTS if group == -1 else group
    if zeros:
        packed, groups = linear.weight_zero_point.data.t(), INPUTS // width
        middle = unpack_from_int32(packed, 4, torch.Size((groups, outputs)))
        codes = codes - middle.t().repeat_interleave(width, dim=1)
    weight = codes.double() * linear.weight_scale.data.double().repeat_interleave(width, dim=1)
    kernel.process_weights_after_loading(linear)
    return kernel, linear, weight


def kinds() -> list[Any]:
    provide_cpu_kernels()
    kernel, *_ = made(TorchCPUInt4LinearKernel, outputs=64, group=64)
    return [kind for kind in possible_kernels(kernel) if one_copy.layout_of(kind) is not None]


@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 70])
@pytest.mark.parametrize("group, zeros", [(32, True), (64, False), (128, True), (256, False)])
@pytest.mark.parametrize("kind", kinds())
def test_the_int4_kernels_multiply_by_the_stored_weights(kind, group, zeros, tokens):
    """Some round weights to 16 bit; PyTorch's and FlexQuant's round only their sums."""
    kernel, linear, weight = made(kind, 128, group, None, zeros)
    x = torch.randn(tokens, INPUTS, dtype=torch.bfloat16)
    x[:, 5] = 1e4  # where the weight may be 0
    expected = x.double() @ weight.t()
    found = kernel.apply_weights(linear, x, None).double()
    assert found.shape == expected.shape and (found - expected).norm() <= 0.01 * expected.norm()
    if issubclass(kind, TorchCPUInt4LinearKernel) and not zeros:  # zero points times scales are bfloat16
        # FlexQuant's multiplies by the integers + 16, and subtracts 16 times the inputs' sum.
        terms = weight.abs() + 2 * weight.abs().amax(1, keepdim=True)
        smallest = 3e-6 * (x.double().abs() @ terms.t())
        assert ((found - expected).abs() <= 2**-8 * expected.abs() + smallest).all()


def int8_weights(*arguments: Any) -> torch.Tensor:
    """Return the weights of all outputs, computed in slices where the loops are compiled."""
    outputs = arguments[1].shape[1]
    parts = [range(64), range(64, outputs)] if one_copy.has_loops() else [range(outputs)]
    return torch.cat([one_copy._int8_weights(*arguments, part).clone() for part in parts], 1)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("outputs", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", kinds())
def test_the_int8_weights_are_the_nearest_or_corrected(kind, outputs, group, zeros, compiled, monkeypatch):
    if compiled:
        assert one_copy.has_loops()
    else:
        monkeypatch.setattr(one_copy, "has_loops", lambda: False)
    kernel, linear, weight = made(kind, outputs, group, None, zeros)
    layout = one_copy.layout_of(kind)
    packed, scale, zero = one_copy.CPUInt8Product(kernel, layout)._weights(linear)
    channel = one_copy.channel_scales(packed, scale, zero, INPUTS, layout)
    expected_scale = weight.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(channel.double()[:, None], expected_scale, rtol=1e-6, atol=0)
    scale, row = scale.float().contiguous(), channel.reciprocal()
    ratio, zeros = scale * row, one_copy._zeros(zero, scale)
    found = int8_weights(packed, scale, zero, row, [], INPUTS, layout)
    # Ties fall either way, by the last bit of a scale.
    assert (found.t() - weight / expected_scale).abs().max() < 0.5 + 1e-4
    assert found.abs().amax(0).eq(127).all()
    column = torch.rand(INPUTS) / 2 + 0.4
    codes = one_copy.unpacked(packed, layout, INPUTS, outputs).view(len(ratio), -1, outputs)
    near = ((codes - zeros[:, None]) * ratio[:, None]).view(INPUTS, outputs) * column[:, None]
    difference = torch.randint(0, 16, (INPUTS, outputs), dtype=torch.uint8)
    expected = (near.round() + difference - 8).to(torch.int8)
    places = torch.rand(outputs, INPUTS).argsort(1)[:, :5].int()
    values = torch.randint(-128, 128, places.shape, dtype=torch.int8)
    expected.t().scatter_(1, places[:, 1:].long(), values[:, 1:])
    places[:, 0] = -1
    nested = [column, one_copy.packed_alike(difference, layout), places, values]
    assert torch.equal(int8_weights(packed, scale, zero, row, nested, INPUTS, layout), expected)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("kind", kinds())
def test_nested_weights_take_activations_with_zero_points(kind, tokens, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(one_copy, "has_loops", lambda: False)
    outputs, layout = 128, one_copy.layout_of(kind)
    kernel, linear, _ = made(kind, outputs, 32, None, zeros=True)
    product = one_copy.CPUInt8Product(kernel, layout)
    packed, scale, zero = product._weights(linear)
    channel = one_copy.channel_scales(packed, scale, zero, INPUTS, layout)
    difference = torch.randint(0, 256, (outputs, INPUTS // 2), dtype=torch.uint8)
    places = torch.rand(outputs, INPUTS).argsort(1)[:, :2].int()
    values = torch.randint(-128, 128, places.shape, dtype=torch.int8)
    nested = {CHANNEL_SCALE: channel, ROW: channel.reciprocal()}
    nested |= zip(NESTED, (torch.rand(INPUTS) / 2 + 0.4, difference, places, values), strict=True)
    buffers = product.prepare(linear, nested, symmetric=False)
    of_weights = [buffers[name] for name in NESTED]
    operands = packed, scale.float().contiguous(), zero, buffers[ROW], of_weights, INPUTS, layout
    weight = int8_weights(*operands).double() * channel.double()
    x, bias = torch.randn(tokens, INPUTS).relu().sub(0.1).bfloat16(), torch.randn(outputs).bfloat16()
    quantised, of_token, middle = ops.onednn_scaled_int8_quant(x, None, None, False)
    exact = (quantised.int() - middle).double() * of_token @ weight + bias
    found = product.multiply(linear, buffers, x.float(), bias.float())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    unquantised = x.double() @ weight + bias
    symmetric = product.multiply(linear, product.prepare(linear, nested), x.float(), bias.float())
    assert (found - unquantised).norm() < 0.7 * (symmetric - unquantised).norm()


@pytest.mark.skipif(not one_copy.has_amx_product(), reason="this CPU has no AMX, or vLLM no product for it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("kind", kinds())
def test_weights_for_amx_are_those_that_vllm_would_pack(kind, zeros, is_nested, dtype):
    kernel, linear, _ = made(kind, outputs=128, group=64, zeros=zeros)
    layout = one_copy.layout_of(kind)
    packed, scale, zero = one_copy.CPUInt8Product(kernel, layout)._weights(linear)
    scale, row = scale.to(dtype).contiguous(), torch.rand(128) * 100
    nested: list[torch.Tensor] = []
    if is_nested:
        places = torch.rand(128, INPUTS).argsort(1)[:, :3].int().contiguous()
        places[::5, 0] = -1
        values = torch.randint(-128, 128, places.shape, dtype=torch.int8)
        difference = torch.randint(0, 16, (INPUTS, 128), dtype=torch.uint8)
        nested = [torch.rand(INPUTS), one_copy.packed_alike(difference, layout), places, values]
    expected = int8_weights(packed, scale.float(), zero, row, nested, INPUTS, layout).t().contiguous()
    found = torch.empty(128, INPUTS + 4, dtype=torch.int8)
    for first in (0, 64):
        torch.ops.flexquant_one_copy.int4_to_amx(
            packed, scale, zero, row, nested, layout.block, layout.in_halves, first, found[first : first + 64]
        )
    assert torch.equal(found, torch.ops._C.convert_weight_packed(expected))


@pytest.mark.skipif(not one_copy.has_amx_product(), reason="this CPU has no AMX, or vLLM no product for it")
@pytest.mark.parametrize("kind", kinds())
def test_slices_for_amx_and_other_types_give_the_same_outputs(kind, monkeypatch):
    kernel, linear, _ = made(kind, outputs=192, group=64)
    layout = one_copy.layout_of(kind)
    assert layout is not None
    product = one_copy.CPUInt8Product(kernel, layout)
    operands = linear, product.prepare(linear)
    x, bias = torch.randn(5, INPUTS).bfloat16(), torch.randn(192).bfloat16()
    whole = product.multiply(*operands, x, bias)
    in_float32 = product.multiply(*operands, x.float(), bias.float())  # which AMX does not take
    monkeypatch.setattr(one_copy, "AMX_WEIGHTS", 64 * INPUTS)
    assert torch.equal(product.multiply(*operands, x, bias), whole)
    assert (in_float32 - whole).norm() < 0.01 * whole.norm()


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("bias", [None, torch.randn(96)], ids=["no bias", "bias"])
def test_sums_are_scaled_without_the_zero_points(bias, zeros):
    assert one_copy.has_loops()
    sums = torch.randint(-(1 << 30), 1 << 30, (5, 96), dtype=torch.int32)
    row, column = torch.rand(5, 1), torch.rand(96)
    middle, of_weights = torch.randint(-128, 128, (5, 1)).int(), torch.randint(-9999, 9999, (96,)).int()
    exact = (sums - middle * of_weights if zeros else sums).float() * row * column
    out = torch.empty(5, 128)[:, 16:112]
    correction = (middle, of_weights) if zeros else (None, None)
    torch.ops.flexquant_one_copy.scale_sums(sums, row, *correction, column, bias, out)
    assert torch.equal(out, exact if bias is None else exact + bias)


LOADED = "from flexquant.serving.kernels.cpu_loops import has_loops; print(has_loops())"


@pytest.mark.parametrize("compiler", rest_full(("false", "no such compiler"), "false"))
def test_a_compiler_that_fails_leaves_the_operators_of_pytorch(compiler, tmp_path):
    own = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "CXX": compiler}
    done = programs.run([sys.executable, "-c", LOADED], timeout=90, environment={**os.environ, **own})
    assert done.stdout.splitlines()[-1] == "False"


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-4096]), "it is damaged"),
        (lambda file: file.write_bytes(b""), "it is damaged"),
        (lambda file: file.chmod(0o666), "other than this one and root can change it"),
        (lambda file: file.chmod(0o775), "other than this one and root can change it"),
        (lambda file: file.parent.chmod(0o777), "at every start"),
        pytest.param(lambda file: os.chown(file, 12345, -1), "can change it", marks=only_root),
        pytest.param(lambda file: os.chown(file.parent, 12345, -1), "at every start", marks=only_root),
    ],
)
def test_loops_damaged_or_open_to_change_are_compiled_anew(change, reason, tmp_path, monkeypatch, caplog):
    """The compiler is a copy of what it has made before."""
    assert cpu_loops.has_loops()
    key = cpu_loops.digest_of(cpu_loops.loops_key())[:16]
    (made,) = (Path(envs.VLLM_CACHE_ROOT) / "flexquant/loops").glob(f"{key}-*.so")
    kept = tmp_path / "flexquant/loops" / made.name
    kept.parent.mkdir(parents=True, mode=0o700)
    shutil.copy2(made, kept)
    done: list[str] = []

    def compiled(*_: Any, build_directory: str, **__: Any) -> None:
        done.append("compiled")
        assert Path(build_directory).stat().st_mode & 0o077 == 0
        shutil.copy(made, build_directory)

    def start() -> list[str]:
        done.clear()
        assert cpu_loops.has_loops.__wrapped__()
        return [*done]

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.load", compiled)
    monkeypatch.setattr(torch.ops, "load_library", lambda file: done.append(file.name))
    assert start() == [kept.name]
    change(kept)
    assert start() == ["compiled"]
    assert f"does not load {kept}: " in caplog.text and reason in caplog.text
    assert start() == (["compiled"] if reason == "at every start" else [kept.name])


@pytest.mark.full
def test_the_loops_are_compiled_after_a_process_was_killed_while_it_compiled(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\ncase "$*" in *-c\\ *) sleep 60;; *) exec c++ "$@";; esac\n')
    slow.chmod(0o755)
    command = [sys.executable, "-c", LOADED]
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    killed = subprocess.Popen(command, env={**environment, "CXX": str(slow)}, start_new_session=True)
    while not list(tmp_path.rglob("build.ninja")):
        assert killed.poll() is None
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    for own in ({}, {"CXX": "false"}):  # the second process loads what the first has compiled
        done = programs.run(command, timeout=90, environment=environment | own)
        assert done.stdout.splitlines()[-1] == "True"


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
    fused = [name for name in found if name.startswith("fma.")]
    assert fused == [], "it rounds once where the reference rounds twice"
    # A word has 8 weights, and 128 bits have 4 words, or 16 weights in 8 bit.
    planes, most = (2, 17) if nested else (1, 11)
    assert found["ld.global.v4.b32"] * THREADS * 32 == planes * WEIGHTS
    assert {name for name in found if name.startswith("st.global")} == {"st.global.v4.b32"}
    assert found["st.global.v4.b32"] * THREADS * 16 == WEIGHTS
    assert found.total() * THREADS < most * WEIGHTS, f"more than {most} instructions a weight"
