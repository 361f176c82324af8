# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Each kept result has a key that covers all that it depends on, and nothing else (flexquant/README.md)."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_checkpoint import weights_identity
from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant, read_merged_config
from flexquant.documents.texts import read_documents
from flexquant.evaluation.inputs import Settings, Subject
from flexquant.layers.memory_fit import PlanLosses
from flexquant.layers.sensitivity import Study
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import Plan
from flexquant.policy.schema import Derivation
from flexquant.quantization.recipe import load_recipe
from flexquant.quantization.report import variant_inputs
from flexquant.quantization.source_model import read_source
from flexquant.serving.kernels import cpu_loops, trial
from flexquant.serving.kernels.choice import _request
from flexquant.serving.kernels.cpu_weight_only import TorchCPUInt4LinearKernel
from flexquant.serving.kernels.layers import kernel_of_layer
from flexquant.serving.vllm_api import scalar_types
from flexquant.serving.worker.plan_views import plan_key
from flexquant.tuning.candidates import find_variants
from flexquant.tuning.measure import Measurement
from flexquant.tuning.samples import QUICK_CPU, Samples
from tests.checkpoints import flip_a_byte, make_checkpoint, make_pair
from tests.keys import assert_whole
from tests.refusals import refused

KERNELS = {"layers.0.mlp": ("Marlin", "vllm.Marlin")}
OTHER_KERNELS = ("layers.0.mlp", "humming.Marlin"), ("b", "c")


def merged_config(architecture: str = "Llama", nested_in: str | None = None, **groups: int) -> MergedConfig:
    """Return a section of three variants; ``groups`` are the sizes of the groups of their weights."""
    variants = {}
    for name, bits in (("w8a8", 8), ("w4a16", 4), ("other", 4)):
        scheme = {"config_groups": {"weights": {"num_bits": bits, "group_size": groups.get(name)}}}
        of = nested_in if name == "w8a8" else None
        variants[name] = StoredVariant(f"{name}.", scheme, True, False, nested_in=of)
    return MergedConfig(architecture, variants)


def derived(**how: str) -> dict[str, Derivation]:
    return {"computed": Derivation.model_validate({"from": "w4a16", "activations": "int8", **how})}


def test_compiled_code_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, merged = Plan.from_layers(("w8a8", "computed")), merged_config()
    key = partial(plan_key, plan=plan, merged=merged, derived=derived(), kernels=KERNELS)
    changes = [
        *(("plan", Plan.from_layers(layers)) for layers in (("computed", "w8a8"), ("w8a8", "w4a16"))),
        *(("merged", merged_config(**{name: 32})) for name in ("w8a8", "w4a16")),
        ("merged", merged_config("Qwen2")),
        *(("merged", merged_config(nested_in="other", other=size)) for size in (32, 64)),
        *[("derived", derived(activations="fp8")), ("derived", derived(weights="int8"))],
        ("derived", derived(weights="fp8")),
        *(("kernels", {path: ("Marlin", kind)}) for path, kind in OTHER_KERNELS),
        ("flexquant.serving.worker.plan_views.__version__", "9.9"),
        ("flexquant.serving.worker.plan_views.versions_of", lambda _: {"humming-kernels": "9.9"}),
    ]
    assert_whole(key, changes, monkeypatch)
    # A new threshold in the policy compiles nothing anew, nor does another scheme that the plan does not run.
    assert key() == key(merged=merged_config(other=32))


@pytest.mark.parametrize("is_cpu", [True, False], ids=["CPU", "GPU"])
def test_trials_of_kernels(is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_layer = {"inputs": 256, "outputs": 128, "dtype": "bfloat16", "group_size": 64}

    def key(sizes: Any = (1,), kernels: Any = ("m:A",), of_kernel: Any = None, **changed: Any) -> Any:
        linear = trial.new_layer({**of_layer, **changed}, TorchCPUInt4LinearKernel)
        kernel: Any = kernel_of_layer(linear)
        kernel.config = replace(kernel.config, **(of_kernel or {}))
        with monkeypatch.context() as patch:
            patch.setattr(type(current_platform), "is_cpu", lambda _: is_cpu)
            return {**trial._circumstances(), **_request(linear, sizes, [*kernels])}

    module = trial.__name__
    (tmp_path / "driver").write_text("another driver\n")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    of_cpu = [(f"{module}.cpu_identity", lambda: ["sse"]), ("torch.get_num_threads", lambda: 99)]
    of_gpu = [(f"{module}.DRIVER", tmp_path / "driver"), ("torch.cuda.get_device_name", lambda: "another")]
    changes = [
        *(of_cpu if is_cpu else of_gpu),
        *[(f"{module}.__version__", "9.9"), (f"{module}.versions_of", lambda _: {"vllm": "9.9"})],
        *[("inputs", 512), ("outputs", 256), ("dtype", "float16"), ("group_size", 32), ("zero_points", True)],
        *(("of_kernel", {"act_type": dtype}) for dtype in (torch.int8, torch.float8_e4m3fn)),
        ("of_kernel", {"weight_type": scalar_types.uint8b128}),
        *[("sizes", (2,)), ("kernels", ("m:B",))],
    ]
    assert_whole(key, changes, monkeypatch)


def test_compiled_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.cpp").write_text("other loops")
    new = {"SOURCES": [tmp_path / "cpu.cpp"], "FLAGS": [], "OPENMP": [], "torch.__version__": ""}
    new |= {"cpu_identity": lambda: ["sse"]}
    assert_whole(cpu_loops.loops_key, [(f"{cpu_loops.__name__}.{n}", v) for n, v in new.items()], monkeypatch)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a merged checkpoint and a model, and both with a changed bit below ``changed``."""
    work = tmp_path_factory.mktemp("keys")
    merge_checkpoints(make_pair(work), work / "merged")
    flip_a_byte(copied(work / "merged", work / "changed" / "merged"), "shared.model.norm.weight")
    make_checkpoint(work / "model", scheme=None)
    flip_a_byte(copied(work / "model", work / "changed" / "model"), "model.norm.weight")
    return work


def test_weights_are_told_by_their_content(folders: Path, tmp_path: Path) -> None:
    renamed, scaled, configured = (copied(folders / "w8a8", tmp_path / name) for name in ("a", "b", "c"))
    tensors = load_file(scaled / "model.safetensors")
    tensors = {name: 3 * tensor if name.endswith("scale") else tensor for name, tensor in tensors.items()}
    save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((configured / "config.json").read_text())
    (configured / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    published = weights_identity(folders / "w8a8")
    assert weights_identity(renamed) == published
    assert published not in (weights_identity(scaled), weights_identity(configured))
    merged = weights_identity(folders / "merged")
    assert merged != weights_identity(folders / "changed/merged"), "with the recorded hashes of before"
    sources = {name: folders / name for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged", policy="w8a8")
    assert weights_identity(tmp_path / "merged") == merged, "a policy computes nothing"


def test_what_is_nested_too_deep_is_told(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("[" * 100_000)
    losses = partial(PlanLosses, kept, "w8a8", ["w4a16"], 2, {})
    for read in (partial(Samples.load, kept, {}), losses, lambda: [*read_documents(kept)]):
        with refused("kept.*inside one another"):
            read()


VERSIONS = ("describe_versions", lambda: {"vllm": "9.9"})
MACHINE = ("describe_machine", lambda: {"cpu": "", "gpu": "another"})
LABEL = ("folder_label", lambda _: "another")


def test_samples_of_tuning(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = find_variants(read_merged_config(folders / "merged")[0], None)

    def key(folder: str = "merged", variants: Any = variants, grid: Any = QUICK_CPU, **options: Any) -> Any:
        return Measurement(folders / folder, variants, grid, tmp_path / "samples.json", **options).run

    changes = [
        *[("folder", "changed/merged"), ("variants", dict([*variants.items()][:1]))],
        *[("grid", replace(QUICK_CPU, context=16)), ("grid", QUICK_CPU.up_to(max_batch=512))],
        *[("tensor_parallel_size", 2), ("enforce_eager", True)],
        *((f"flexquant.tuning.measure.{name}", value) for name, value in (VERSIONS, MACHINE, LABEL)),
    ]
    assert_whole(key, changes, monkeypatch)


def test_sensitivities_of_layers(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("text.txt", "other.txt"):
        (tmp_path / name).write_text(f"The quick {name} jumps over the lazy dog. " * 40)
    merged, _ = read_merged_config(folders / "merged")
    two, derives = (find_variants(merged, ["w8a8", name]) for name in ("w4a16", "w4a8"))
    few = Settings(batch_sizes=(2,), samples=2, prompt_tokens=8, tokens=4)

    def key(folder="merged", variants=two, text="text.txt", of: Any = "model", how=few) -> Any:
        study = Study(Subject(folders / folder), variants, tmp_path / text, of and str(folders / of), how)
        never_alike = {"kl", "schema", "layers"}  # the number of layers is the model's
        return {part: value for part, value in study.described().items() if part not in never_alike}

    changes = [
        *[("folder", "changed/merged"), ("variants", dict(reversed(two.items()))), ("variants", derives)],
        *[("text", "other.txt"), ("of", "changed/model"), ("of", None)],
        *(("how", replace(few, **{name: 4})) for name in ("samples", "seed", "prompt_tokens")),
        *((f"flexquant.layers.sensitivity.{name}", value) for name, value in (VERSIONS, MACHINE, LABEL)),
        ("flexquant.layers.sensitivity.read_rows", lambda *_: [[1, 2]]),  # with another tokenizer
    ]
    assert_whole(key, changes, monkeypatch)


def test_variants_that_a_resumed_build_keeps(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipes = read_source(folders / "model"), load_recipe("default").variants
    files = [{**model.files_sha256, name: ""} for name in model.files_sha256]
    changes = [
        *[("source", read_source(folders / "changed/model")), ("source", replace(model, config_sha256=""))],
        *(("source", replace(model, files_sha256=others)) for others in files),
        *[("recipe", recipes["w8a8"]), ("rows", [[1, 3]]), ("rows", None), ("seed", 1)],
        ("nested_in", {"recipe": "another"}),
        ("flexquant.quantization.report.versions", lambda: {"flexquant": "9.9"}),
    ]
    key = partial(variant_inputs, source=model, recipe=recipes["w4a16"], rows=[[1, 2]], seed=0)
    assert_whole(key, changes, monkeypatch)
