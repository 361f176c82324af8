# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Each kept result has a key that covers all that it depends on, and nothing else (flexquant/README.md)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_checkpoint import weights_identity
from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant, read_merged_config
from flexquant.evaluation.inputs import Settings, Subject
from flexquant.layers.sensitivity import Study
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import Plan
from flexquant.policy.schema import Derivation
from flexquant.quantization.recipe import load_recipe
from flexquant.quantization.report import variant_inputs
from flexquant.quantization.source_model import read_source
from flexquant.serving.kernels import trial
from flexquant.serving.kernels.choice import _request
from flexquant.serving.kernels.cpu_kernels import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.layers import kernel_of_layer
from flexquant.serving.worker.one_copy import cpu as one_copy
from flexquant.serving.worker.plan_views import plan_key
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.measure import Measurement
from flexquant.tuning.samples import QUICK_CPU
from tests.checkpoints import flip_a_byte, make_checkpoint
from tests.keys import assert_whole

KERNELS = {"layers.0.mlp": ("Marlin", "vllm.Marlin")}


def merged_config(
    architecture: str = "LlamaForCausalLM", nested_in: str | None = None, **groups: int
) -> MergedConfig:
    """Return a section of three variants; ``groups`` are the sizes of the groups of their weights."""
    variants = {
        name: StoredVariant(
            f"{name}.",
            {"config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": groups.get(name)}}}},
            own_head=True,
            negative_scales=False,
            nested_in=nested_in if name == "w8a8" else None,
        )
        for name, bits in (("w8a8", 8), ("w4a16", 4), ("other", 4))
    }
    return MergedConfig(architecture, variants)


def derived(**how: str) -> dict[str, Derivation]:
    return {"computed": Derivation.model_validate({"from": "w4a16", "activations": "int8", **how})}


MERGED, INT8 = merged_config(other=64), derived()


def plan_parts(
    layers: tuple[str, ...] = ("w8a8", "computed"),
    merged: MergedConfig = MERGED,
    how: dict[str, Derivation] = INT8,
    kernels: dict[str, Any] = KERNELS,
) -> dict[str, Any]:
    return plan_key(Plan.from_layers(layers), merged, how, kernels)


def test_compiled_code_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        ("layers", ("computed", "w8a8")),
        ("layers", ("w8a8", "w4a16")),
        *(("merged", merged_config(other=64, **{name: 32})) for name in ("w8a8", "w4a16")),
        ("merged", merged_config("Qwen2ForCausalLM", other=64)),
        ("merged", merged_config(nested_in="w4a16", other=64)),
        ("merged", merged_config(nested_in="other", other=64)),
        ("merged", merged_config(nested_in="other", other=32)),
        ("how", derived(activations="fp8")),
        ("how", derived(weights="int8")),
        ("how", derived(weights="fp8")),
        ("kernels", {"layers.0.mlp": ("Marlin", "humming.Marlin")}),
        ("kernels", {"layers.1.mlp": ("Marlin", "vllm.Marlin")}),
        ("flexquant.serving.worker.plan_views.__version__", "9.9"),
    ]
    assert_whole(plan_parts, changes, monkeypatch)
    # A new threshold in the policy compiles nothing anew, nor does another scheme that the plan does not run.
    assert plan_parts() == plan_parts(merged=merged_config(other=32))


@pytest.mark.parametrize("is_cpu", [True, False], ids=["CPU", "GPU"])
def test_trials_of_kernels(is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("another driver\n")
    layer = {"inputs": 256, "outputs": 128, "dtype": "bfloat16", "group_size": 64}

    def parts(sizes: tuple[int, ...] = (1,), kernels: tuple[str, ...] = ("m:A",), **changed: Any) -> Any:
        act_type = changed.pop("act_type", None)
        linear = trial.new_layer({**layer, **changed}, TorchCPUInt4LinearKernel)
        kernel: Any = kernel_of_layer(linear)
        kernel.config = replace(kernel.config, act_type=act_type)
        request = _request(linear, sizes, [*kernels])
        with monkeypatch.context() as patch:
            patch.setattr(type(current_platform), "is_cpu", lambda _: is_cpu)
            return {**trial._circumstances(), **request}

    module = trial.__name__
    here: list[tuple[str, Any]] = [(f"{module}.cpu_identity", lambda: ["flags: sse"])]
    here.append((f"{module}.torch.get_num_threads", lambda: 99))
    if not is_cpu:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        here = [(f"{module}.torch.cuda.get_device_name", lambda: "another GPU")]
        here.append((f"{module}.DRIVER", tmp_path / "version"))
    changes = [
        *here,
        (f"{module}.__version__", "9.9"),
        (f"{module}.versions_of", lambda _: {"vllm": "9.9"}),
        *[("inputs", 512), ("outputs", 256), ("dtype", "float16"), ("group_size", 32), ("zero_points", True)],
        *[("act_type", torch.int8), ("act_type", torch.float8_e4m3fn)],
        *[("sizes", (1, 2)), ("kernels", ("m:B",))],
    ]
    assert_whole(parts, changes, monkeypatch)


def test_compiled_loops_of_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.cpp").write_text("other loops")
    module = one_copy.__name__
    changes = [
        (f"{module}.SOURCE", tmp_path / "cpu.cpp"),
        (f"{module}.FLAGS", ["-O2"]),
        ("torch.__version__", "9.9"),
        (f"{module}.cpu_identity", lambda: ["flags: sse"]),
    ]
    assert_whole(one_copy.loops_key, changes, monkeypatch)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a merged checkpoint and a model, and both with a changed bit below ``changed``."""
    work = tmp_path_factory.mktemp("keys")
    sources = {name: make_checkpoint(work / name, scheme=name) for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, work / "merged")
    flip_a_byte(copied(work / "merged", work / "changed" / "merged"), "shared.model.norm.weight")
    make_checkpoint(work / "model", scheme=None)
    flip_a_byte(copied(work / "model", work / "changed" / "model"), "model.norm.weight")
    return work


def test_weights_are_told_by_their_content(folders: Path, tmp_path: Path) -> None:
    for name in ("merged", "w8a8", "model"):
        copy = copied(folders / name, tmp_path / "renamed" / name)
        assert weights_identity(copy) == weights_identity(folders / name)
    tensors = load_file(folders / "w8a8/model.safetensors")
    scaled = copied(folders / "w8a8", tmp_path / "scaled")
    tripled = {key: 3 * value if key.endswith("scale") else value for key, value in tensors.items()}
    save_file(tripled, scaled / "model.safetensors", metadata={"format": "pt"})
    rotated = copied(folders / "w8a8", tmp_path / "rotated")
    config = json.loads((rotated / "config.json").read_text())
    (rotated / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    for other, folder in ((scaled, "w8a8"), (rotated, "w8a8"), (folders / "changed/merged", "merged")):
        assert weights_identity(other) != weights_identity(folders / folder)
    sources = {name: folders / name for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged", policy="w8a8")
    assert weights_identity(tmp_path / "merged") == weights_identity(folders / "merged"), (
        "policies compute nothing"
    )


def test_samples_of_tuning(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = find_variants(read_merged_config(folders / "merged")[0], None)

    def parts(folder: str = "merged", variants: Any = variants, grid: Any = QUICK_CPU, **options: Any) -> Any:
        return Measurement(folders / folder, variants, grid, tmp_path / "samples.json", **options).run

    module = "flexquant.tuning.measure"
    changes = [
        ("folder", "changed/merged"),
        ("variants", dict([*variants.items()][:1])),
        ("grid", replace(QUICK_CPU, context=16)),
        ("grid", QUICK_CPU.up_to(max_batch=512)),
        *[("tensor_parallel_size", 2), ("enforce_eager", True)],
        (f"{module}.folder_label", lambda folder: "another"),
        (f"{module}.describe_machine", lambda: {"gpu": "another"}),
        (f"{module}.describe_versions", lambda: {"vllm": "9.9"}),
    ]
    assert_whole(parts, changes, monkeypatch)


def test_sensitivities_of_layers(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in (("", "The quick brown fox. "), ("other", "Jumps over the lazy dog. ")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "text.txt").write_text(text * 40)
    variants = find_variants(read_merged_config(folders / "merged")[0], ["w8a8", "w4a16"])
    derives = find_variants(read_merged_config(folders / "merged")[0], ["w8a8", "w4a8"])
    few = Settings(batch_sizes=(2,), samples=2, prompt_tokens=8, tokens=4)

    def parts(
        folder: str = "merged",
        variants: Any = variants,
        text: str = "text.txt",
        reference: str | None = "model",
        settings: Settings = few,
    ) -> Any:
        of = None if reference is None else str(folders / reference)
        study = Study(Subject(folders / folder), variants, tmp_path / text, of, settings)
        described = dict(study.described())
        assert described.pop("kl") == {} and described.pop("schema") and described.pop("layers") == 2
        return described

    module = "flexquant.layers.sensitivity"
    changes = [
        ("folder", "changed/merged"),
        ("variants", dict(reversed(variants.items()))),
        ("variants", derives),
        ("text", "other/text.txt"),
        *[("reference", "changed/model"), ("reference", None)],
        *(("settings", replace(few, **{name: 4})) for name in ("samples", "seed", "prompt_tokens")),
        (f"{module}.folder_label", lambda folder: "another"),
        (f"{module}.read_rows", lambda *_: [[1, 2]]),
        (f"{module}.describe_machine", lambda: {"gpu": "another", "cpu": ""}),
        (f"{module}.describe_versions", lambda: {"vllm": "9.9"}),
    ]
    assert_whole(parts, changes, monkeypatch)


def test_variants_that_a_resumed_build_keeps(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_source(folders / "model")
    recipe, other = (load_recipe("default").variants[name] for name in ("w4a16", "w8a8"))

    def parts(source: Any = model, recipe: Any = recipe, rows: Any = ((1, 2),), seed: int = 0) -> Any:
        return variant_inputs(source, recipe, rows, seed)

    changes = [
        ("source", read_source(folders / "changed/model")),
        ("source", replace(model, config_sha256="another")),
        *(
            ("source", replace(model, files_sha256={**model.files_sha256, name: ""}))
            for name in model.files_sha256
        ),
        ("recipe", other),
        *[("rows", ((1, 3),)), ("rows", None), ("seed", 1)],
        ("flexquant.quantization.report.versions", lambda: {"flexquant": "9.9"}),
    ]
    assert_whole(parts, changes, monkeypatch)
