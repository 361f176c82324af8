# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Weights of which a layer makes others: with rotated inputs, W8A8 nested in INT4, and INT8 from 16 bit.

A linear whose inputs are rotated answers as one without, also in one copy; what is nested is served as the
checkpoint is that a split gives back; the large passes of a model in 16 bit compute in 8 bit.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexquant.cli import main
from flexquant.doctor.examining import examine
from flexquant.errors import FlexQuantError
from flexquant.evaluation.engine import take_policy
from flexquant.merge import merge_checkpoints, split_checkpoint
from flexquant.policy.rules import load_policy
from flexquant.serving.kernels.layers import kernel_name, linear_sizes
from flexquant.serving.vllm_api import HadamardTransform, LinearBase
from flexquant.serving.vllm_api import _custom_ops as ops
from flexquant.serving.worker import rotations
from flexquant.serving.worker.one_copy.methods import NestedMethod
from tests.checkpoints import make_checkpoint, make_pair
from tests.integration.conftest import answers, distance, edited_json, engine, generate
from tests.integration.test_serving_errors import configure, flexquant, refusal
from tests.policies import rules
from tests.rotations import BLOCK, GROUP, make_rotated, rotation

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is a city of more than two million people,", "def merge(a, b):"]
SAMPLING = {"max_tokens": 8}
POLICIES = ["w8a8", "w4a16", "one-copy"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_way_to_its_weights_rotates_its_inputs(tmp_path: Path, compiled: bool) -> None:
    signs = {"w8a8": None, "w4a16": 0}  # without random ones a loop rotates on a CPU
    sources = {scheme: make_rotated(tmp_path / scheme, scheme, seed=seed) for scheme, seed in signs.items()}
    merge_checkpoints(sources, tmp_path / "rotated")
    merge_checkpoints(make_pair(tmp_path / "pair"), tmp_path / "plain")
    options = {"sampling": SAMPLING, "enforce_eager": not compiled}
    rotated = generate(tmp_path / "rotated", POLICIES, PROMPTS, **options)
    plain = generate(tmp_path / "plain", POLICIES, PROMPTS, **options)
    in_int8, in_int4, from_int4 = (one.answers[0] for one in rotated)
    plain_in_int8, plain_in_int4, _ = (one.answers[0] for one in plain)
    rounding = distance(plain_in_int4, plain_in_int8)
    assert distance(in_int8, plain_in_int8) < rounding / 2
    assert distance(from_int4, in_int4) < rounding / 2
    assert distance(in_int4, in_int8) < 1.5 * rounding


def test_vllms_operator_is_kept_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None:
        """Stand for vLLM's method, and for the operator that it calls."""

    monkeypatch.setattr(HadamardTransform, "forward", own)
    monkeypatch.setattr(torch.ops._C, "hadacore_transform", own, raising=False)
    rotations.provide_rotations.__wrapped__()
    assert HadamardTransform.forward is own
    monkeypatch.undo()
    rotations.provide_rotations.__wrapped__()
    assert HadamardTransform.forward is not own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", rotations.LOOP_SIZES)
def test_the_loop_multiplies_by_hadamards_matrix(size: int, dtype: torch.dtype) -> None:
    assert rotations._load_loop()
    x = torch.randn(3, 7, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype)[:, ::2]
    matrix = rotations._hadamard(size).double() / size**0.5
    expected = (x.double().unflatten(-1, (-1, size)) @ matrix).flatten(-2)
    found = torch.ops.flexquant_rotation.rotate(x, size)
    assert found.dtype == dtype and found.shape == x.shape
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.library.opcheck(torch.ops.flexquant_rotation.rotate.default, (x, size))


def test_hadamards_matrix_alone_has_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    hadamard = rotations._hadamard(BLOCK)
    assert rotations._has_loop([hadamard, hadamard.bfloat16()])
    assert not rotations._has_loop([hadamard, rotation()])
    assert not rotations._has_loop([rotations._hadamard(8)])
    monkeypatch.setattr(rotations, "_load_loop", lambda: False)
    assert not rotations._has_loop([hadamard])


def merge_one_rotated(folder: Path, output: Path) -> Path:
    """Merge W8A8 with rotated inputs, and W4A16 without."""
    w8a8 = make_rotated(folder / "w8a8", "w8a8")
    merge_checkpoints({"w8a8": w8a8, "w4a16": make_checkpoint(folder / "w4a16", scheme="w4a16")}, output)
    return output


def test_what_ranks_and_the_host_cannot_rotate_is_refused(tmp_path: Path) -> None:
    merged = merge_one_rotated(tmp_path, tmp_path / "merged")
    assert "drop --cpu-offload-gb" in refusal(merged, cpu_offload_gb=1, **flexquant(policy="phase"))
    configure(merged, tensor_parallel_size=2, **flexquant(policy="phase"))
    with edited_json(merged / "config.json") as config:
        stored = config["quantization_config"]["variants"]["w8a8"]["quantization_config"]
        del stored["transform_config"]["config_groups"][GROUP]["head_dim"]
    problem = refusal(merged, tensor_parallel_size=2, **flexquant(policy="phase"))
    assert "'w8a8', which rotates outputs, or all inputs of a linear at once, under tensor" in problem
    configure(merged, tensor_parallel_size=2, **flexquant(policy="w4a16"))


def test_a_rank_without_whole_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rotations.BLOCK", 256)
    merged = merge_one_rotated(tmp_path, tmp_path / "merged")
    *_, last = examine(str(merged), ["--tensor-parallel-size", "2", "--max-model-len", "64"])
    assert "'model.layers.0.mlp.down_proj' in blocks of 256, and a rank has 128; choose another" in last.text


def test_the_matrix_is_loaded_where_its_layer_is_in_no_plan(tmp_path: Path) -> None:
    """The checkpoint has it under layer 0 alone. A second engine finds its memory where the first left it."""
    merge_one_rotated(tmp_path, tmp_path / "rotated")
    merge_checkpoints(make_pair(tmp_path / "pair"), tmp_path / "plain")
    policies = [rules('- use: {default: w8a8, layers: {"0": w4a16}}')]
    first, second, plain = (
        generate(tmp_path / name, policies, PROMPTS, sampling=sampling)[0].answers[0]
        for name, sampling in (("rotated", SAMPLING), ("rotated", {"max_tokens": 7}), ("plain", SAMPLING))
    )
    assert max(distance(first, plain), distance(second, plain)) < 0.05


MIXED = rules(
    "- {when: {phase: [prefill, mixed]}, use: w8a8}", '- use: {default: w4a16, layers: {"0": w8a8}}'
)


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nested")
    merge_checkpoints(make_pair(folder, "qwen2"), folder / "merged", nested="near")
    split_checkpoint(folder / "merged", "w8a8", folder / "split")
    return folder


def test_it_answers_as_the_checkpoint_that_a_split_gives_back(nested: Path) -> None:
    policies = ["w8a8", "w4a16", "phase", MIXED]
    in_int8, in_int4, routed, mixed = generate(nested / "merged", policies, PROMPTS, sampling=SAMPLING)
    (split,) = generate(nested / "split", None, PROMPTS, sampling=SAMPLING)
    (int4,) = generate(nested / "w4a16", None, PROMPTS, sampling=SAMPLING)
    as_split, as_int4 = (distance(found.answers[0], split.answers[0]) for found in (in_int8, int4))
    assert as_split < 0.03 and as_split < as_int4 / 2, (as_split, as_int4)
    assert distance(in_int4.answers[0], int4.answers[0]) < 0.01
    assert {(p["phase"], p["plan"]) for p in routed.passes} == {("prefill", "w8a8"), ("decode", "w4a16")}
    assert {p["plan"] for p in mixed.passes} == {"w8a8", "w8a8+w4a16[1]"}


def test_activations_with_zero_points_are_quantised_with_them(nested: Path, tmp_path: Path) -> None:
    sources = {"w8a8": shutil.copytree(nested / "w8a8", tmp_path / "w8a8"), "w4a16": nested / "w4a16"}
    with edited_json(tmp_path / "w8a8" / "config.json") as config:
        for group in config["quantization_config"]["config_groups"].values():
            group["input_activations"]["symmetric"] = False
    merge_checkpoints(sources, tmp_path / "merged", nested="near")
    split_checkpoint(tmp_path / "merged", "w8a8", tmp_path / "split")
    (found,) = generate(tmp_path / "merged", ["w8a8"], PROMPTS, sampling=SAMPLING)
    with_zero_points, symmetric = (
        generate(folder, None, PROMPTS, sampling=SAMPLING)[0].answers[0]
        for folder in (tmp_path / "split", nested / "split")
    )
    own, other = (distance(found.answers[0], split) for split in (with_zero_points, symmetric))
    assert own < other / 2, (own, other)


def test_it_takes_the_memory_of_half_of_its_weights(nested: Path) -> None:
    """INT4 weights, which it needs, are loaded for it where no plan uses them."""

    def inspect(model: Any) -> dict[str, Any]:
        linears = [m for m in model.modules() if isinstance(getattr(m, "quant_method", None), NestedMethod)]
        sizes = [m.input_size_per_partition * m.output_size_per_partition for m in linears]
        stored = [p.nbytes for m in linears for p in m.parameters(recurse=False)]
        found = {"weights": sum(sizes), "largest": max(sizes), "stored": sum(stored)}
        return found | {"bytes": model.weight_bytes}

    answered = []
    with engine(nested / "merged", flexquant={"policy": "w8a8"}) as llm:
        (found,) = llm.apply_model(inspect)
        for policy in ("w4a16", "w8a8"):
            take_policy(llm, policy, load_policy(policy).document)
            answered.append(answers(llm, PROMPTS, **SAMPLING))
    assert found["weights"] / 2 < found["stored"] < 0.65 * found["weights"]
    assert found["bytes"]["w8a8"] >= found["stored"] + found["largest"]
    assert found["bytes"]["w4a16"] > found["weights"] / 2
    in_int4, in_int8 = answered
    (split,) = generate(nested / "split", None, PROMPTS, sampling=SAMPLING)
    assert distance(in_int8, split.answers[0]) < 0.03 < distance(in_int4, split.answers[0])


def test_another_dtype_is_refused(nested: Path) -> None:
    """The scales of INT4 would be rounded, and INT8 weights computed from them be others."""
    problem = refusal(nested / "merged", dtype="float16")
    assert "from INT4 scales in bfloat16, in float16 (drop --dtype, or merge with --dtype float16)" in problem


def test_factors_that_differ_among_fused_linears_are_not_served(nested: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nested / "merged", tmp_path / "merged")
    key = "w8a8.model.layers.1.self_attn.k_proj.weight_column"
    file = next(file for file in folder.glob("*.safetensors") if key in load_file(file))
    tensors = load_file(file)
    save_file(tensors | {key: 2 * tensors[key]}, file, metadata={"format": "pt"})
    differs = pytest.raises(FlexQuantError, match=r"layers\.1\.self_attn\.qkv_proj .* weight_column differs")
    with differs, engine(folder, "w8a8"):
        pass


@pytest.mark.full
def test_compiled_it_answers_alike(nested: Path) -> None:
    (compiled,) = generate(nested / "merged", ["phase"], PROMPTS, sampling=SAMPLING, enforce_eager=False)
    (eager,) = generate(nested / "merged", ["phase"], PROMPTS, sampling=SAMPLING)
    assert distance(compiled.answers[0], eager.answers[0]) < 0.03
    assert {p["plan"] for p in compiled.passes} == {"w8a8", "w4a16"}


LONG = ["word " * 30 + PROMPTS[0], "all " * 40 + PROMPTS[1]]
DERIVED = "{from: bf16, activations: int8, weights: int8}"
FROM_16_BIT = rules("- use: int8") + f"derive: {{int8: {DERIVED}}}\n"
INT8_TWICE = f"derive: {{int8: {DERIVED}, again: {DERIVED}}}\n"
INT8_TWICE += rules("- {when: {phase: decode}, use: again}", "- use: int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("16-bit") / "model", "qwen2", None)


def write_rounded(model: Path, output: Path) -> Path:
    """Write the W8A8 checkpoint whose weights are those of the model, rounded."""
    make_checkpoint(output, "qwen2", "w8a8")
    file, weights = output / "model.safetensors", load_file(model / "model.safetensors")
    state = load_file(file)
    for name in [key.removesuffix("_scale") for key in state if key.endswith(".weight_scale")]:
        state[name], state[f"{name}_scale"], _ = ops.scaled_int8_quant(weights[name])
    save_file(state, file, metadata={"format": "pt"})
    return output


def test_short_prompts_and_answers_are_those_of_the_model(model: Path) -> None:
    ((short, long), passes, _) = generate(model, ["prefill-8-bit"], PROMPTS, LONG, sampling=SAMPLING)[0]
    ((stock, stock_long), *_) = generate(model, None, PROMPTS, LONG, sampling=SAMPLING)[0]
    assert short == stock
    assert 0 < distance(long, stock_long) < 0.2
    taken = {(p["phase"], p["plan"]) for p in passes}
    assert taken == {("prefill", "bf16"), ("prefill", "int8-from-16-bit"), ("decode", "bf16")}


@pytest.fixture(scope="module")
def rounded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rounded(model, tmp_path_factory.mktemp("rounded") / "w8a8")


def test_in_int8_16_bit_weights_answer_as_their_rounded_checkpoint(model: Path, rounded: Path) -> None:
    (stock,) = generate(rounded, None, PROMPTS, LONG, sampling=SAMPLING)
    for policy in (FROM_16_BIT, INT8_TWICE):
        (ours,) = generate(model, [policy], PROMPTS, LONG, sampling=SAMPLING)
        assert ours.answers == stock.answers


def test_merged_beside_a_variant_in_int8_it_answers_alike(model: Path, rounded: Path, tmp_path: Path) -> None:
    merge_checkpoints({"bf16": model, "w8a8": rounded}, tmp_path / "merged", policy="w8a8")
    policies = ["prefill-8-bit", "w8a8", rules('- use: {default: w8a8, layers: {"0": bf16}}')]
    merged = generate(tmp_path / "merged", policies, PROMPTS, LONG, sampling=SAMPLING)
    from_16_bit, stored, mixed = merged
    (alone,) = generate(model, ["prefill-8-bit"], PROMPTS, LONG, sampling=SAMPLING)
    (stock,) = generate(rounded, None, PROMPTS, LONG, sampling=SAMPLING)
    assert (from_16_bit.answers, stored.answers) == (alone.answers, stock.answers)
    assert 0 < distance(mixed.answers[1], stored.answers[1]) < 0.2


@pytest.mark.full
def test_a_16_bit_model_compiled_answers_alike(model: Path) -> None:
    compiled, eager = (
        generate(model, ["prefill-8-bit"], LONG, sampling=SAMPLING, enforce_eager=is_eager)[0]
        for is_eager in (False, True)
    )
    assert distance(compiled.answers[0], eager.answers[0]) < 0.03
    assert {p["plan"] for p in compiled.passes} == {"bf16", "int8-from-16-bit"}


def test_routers_experts_and_logits_stay_in_16_bit(tmp_path):
    # A router of 16 experts could be multiplied in 8 bit.
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", None, num_experts=16)

    def kernels(model: Any) -> dict[str, bool]:
        layers = model.variants["int8"].model.layers[0].named_modules()
        return {path: "16 bit)" in kernel_name(m) for path, m in layers if isinstance(m, LinearBase)}

    def copied(model: Any) -> int:
        """Return the bytes of a weight and a scale an output, as vLLM's operator gives them."""
        linears = [m for m in model.variants["int8"].modules() if isinstance(m, LinearBase)]
        sizes = [linear_sizes(m) for m in linears if "16 bit)" not in kernel_name(m)]
        made = (ops.scaled_int8_quant(torch.ones(outputs, inputs)) for inputs, outputs in sizes)
        return sum(part.nbytes for weight, scales, _ in made for part in (weight, scales))

    with engine(folder, FROM_16_BIT) as llm:
        (in_16_bit,) = llm.apply_model(kernels)
        (nbytes,) = llm.apply_model(lambda model: model.weight_bytes)
        (expected,) = llm.apply_model(copied)
        layers = llm.apply_model(lambda model: model.variants["bf16"].model.layers)
        assert llm.generate(PROMPTS, use_tqdm=False)
    assert in_16_bit == {"self_attn.qkv_proj": False, "self_attn.o_proj": False, "mlp.gate": True}
    freed = layers[0][0].self_attn.o_proj.weight.numel() == 0
    assert freed == torch.cpu._is_avx512_supported(), "where it can, vLLM packs a weight, and frees it"
    assert 0 < nbytes["int8"] == expected < nbytes["bf16"] / 2


def test_a_draft_model_in_the_same_format_is_left_to_vllm(model: Path, tmp_path: Path) -> None:
    int4 = make_checkpoint(tmp_path / "int4", "qwen2", "w4a16")
    for draft in (model, int4):
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        config = configure(model, config_format="flexquant", speculative_config=speculative)
        of_draft = config.speculative_config.draft_model_config
        assert of_draft.architecture == "Qwen2ForCausalLM" != config.model_config.architecture
        assert of_draft.quantization == (None if draft == model else "compressed-tensors")
    with engine(model, "prefill-8-bit", speculative_config=speculative) as llm:
        drafted = answers(llm, PROMPTS, **SAMPLING)
    (stock,) = generate(model, None, PROMPTS, LONG, sampling=SAMPLING)
    assert distance(drafted, stock.answers[0]) < 0.03


def test_fp8_is_refused_on_a_cpu(model: Path) -> None:
    said = refusal(model, config_format="flexquant", **flexquant(policy="prefill-fp8"))
    assert "which is for GPUs; choose a policy without it" in said


def test_commands_read_a_16_bit_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model)]) == 0
    assert "16 bit" in capsys.readouterr().out
    main(["doctor", str(model)])
    assert "int8-from-16-bit" in capsys.readouterr().out
