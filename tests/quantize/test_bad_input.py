# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Models, data and machines that cannot work are refused with what was found, and nothing is left behind."""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from flexquant import cli
from flexquant.errors import FlexQuantError
from tests import programs
from tests.checkpoints import StateDict, make_checkpoint
from tests.publishers import edits
from tests.quantize.quantizing import RTN, W4A16, quantize, recipe
from tests.what_configs_name import MAY_REFUSE, run_all

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def test_errors(model: Path, variants: Path, tmp_path: Path) -> None:
    def refused(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(FlexQuantError, match=match):
            quantize(*args, **options)

    output, empty = tmp_path / "out", tmp_path / "empty.txt"
    empty.touch()
    no_variant = "'w3a3' is no variant of the recipe 'default'; it has w8a8, w4a16"
    refused(no_variant, model, output, "default", "w3a3")
    refused("no variant is chosen; the recipe has w8a8", model, output, "default", variants=[])
    eight = {"GPTQModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}
    for w8a8, others, problem in (
        (eight, {"w4a16": eight}, "which is not quantised to W4A16; name"),
        (W4A16, {"w4a16": W4A16}, "and is not quantised to W8A8"),
        (eight, {}, f"which neither this run makes nor .*; quantise 'w4a16' into {output} first"),
    ):
        refused(
            f"has nested_in: w4a16, {problem}",
            *(model, output, recipe(w8a8={**w8a8, "nested_in": "w4a16"}, **others)),
        )
    refused("no such folder", tmp_path / "missing", output)
    refused("has no file 'config.json'", tmp_path, output)
    refused("is quantised already", variants / "w8a8", output)
    refused("w8a8 is finished; go on with --resume, or .*--overwrite", model, variants)
    refused("overlaps the input", model, model)
    refused(f"cannot write .*: {empty} is no folder to write into", model, empty / "out")
    refused("the calibration data has no text", model, output, calibration=empty)
    refused("there is no file .*no.txt; give a file", model, output, calibration=tmp_path / "no.txt")
    refused("neither a file nor a Hugging Face dataset", model, output, calibration="no/dataset")
    assert not output.exists()


def test_int4_weights_that_an_earlier_run_made_are_those_of_the_model(
    model: Path, variants: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    changed(lambda weight: weight + 1)(other)
    eight = {"GPTQModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}
    for made, source, problem in (
        ("w4a16", other, "w4a16 was made from another model than .*/other; quantise 'w4a16' anew"),
        ("w8a8", model, "w4a16 has no INT4 weights to nest in"),
    ):
        output = tmp_path / made
        shutil.copytree(variants / made, output / "w4a16")
        with pytest.raises(FlexQuantError, match=problem):
            quantize(source, output, recipe(w8a8={**eight, "nested_in": "w4a16"}))
        assert [folder.name for folder in output.iterdir()] == ["w4a16"]


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> edits.Edit:
    return edits.tensors(lambda state: state.update({Q_PROJ: change(state[Q_PROJ])}))


def with_one(value: float) -> edits.Edit:
    return edits.tensors(lambda state: state[Q_PROJ][3, 5].fill_(value))


def link_out(name: str) -> edits.Edit:
    def apply(model: Path) -> None:
        secret = model.parent / "secret"
        (model / name).rename(secret) if (model / name).exists() else secret.touch()
        (model / name).symlink_to("../secret")

    return apply


def beside_another(model: Path) -> None:
    """Put the weights of another model, in shards, beside those that there are."""
    shards = make_checkpoint(model.parent / "other", scheme=None, num_layers=1, seed=1, num_shards=2)
    for file in shards.glob("*.safetensors*"):
        shutil.copy(file, model)


def with_200_features(model: Path) -> None:
    shutil.rmtree(model)
    make_checkpoint(model, scheme=None, num_layers=1, intermediate_size=200)


def in_int8(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 100).to(torch.int8)


OF_NOBODY = "names the architecture OfNobodyForCausalLM, and transformers computes the model_type 'llama' as"
IN_INT8 = r"self_attn.q_proj.weight' in .*model.safetensors has dtype int8; .* float16, bfloat16 or"
LACKS_DOWN_PROJ = r"lacks 1 of the parameters of .*'model\.layers\.0\.mlp\.down_proj\.weight'"
NO_NUMBER = r"self_attn.q_proj.weight' in .* holds NaN or infinite numbers"
LINKED = ("LICENSE", "tokenizer.json", "vocab.txt", "modeling_own.py", "config.json")
ADAPTER = edits.file("adapter_config.json", '{"base_model_name_or_path": "org/name"}')
QUANTISED = {
    "gptq": edits.file("quantize_config.json", '{"bits": 4, "group_size": 64}'),
    "awq": edits.file("quant_config.json", '{"w_bit": 4, "zero_point": true}'),
    "modelopt": edits.file("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}'),
    "compressed-tensors": edits.config(compression_config={"quant_method": "compressed-tensors"}),
}


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (with_200_features, r"layers\.0\.mlp\.down_proj has 200 input features"),
        (changed(in_int8), IN_INT8),
        (changed(torch.Tensor.double), r"self_attn.q_proj.weight' in .* has dtype float64"),
        (with_one(float("nan")), NO_NUMBER),
        (with_one(float("inf")), NO_NUMBER),
        (edits.without("down_proj"), LACKS_DOWN_PROJ),
        (edits.config(architectures=["OfNobodyForCausalLM"]), OF_NOBODY),
        (edits.without(r"model\.norm", "lm_head"), r"lacks 2 of the parameters of .*model\.norm\.weight"),
        (edits.generation(num_return_sequences=2), "generation settings of .*num_return_sequences"),
        *((link_out(name), f"'{name}' leads outside the checkpoint folder") for name in LINKED),
        *(
            (edit, rf"model is quantised already \({kind}\); start from the 16")
            for kind, edit in QUANTISED.items()
        ),
        (beside_another, r"model-00001-of-00002.*, but transformers loads model\."),
        (edits.renamed("weights.safetensors"), r"tensors in weights\.safetensors, but transformers loads"),
        (ADAPTER, r"holds an adapter \(adapter_config.json\); merge it"),
    ],
)
def test_a_model_that_cannot_be_quantised_is_refused_first(small, tmp_path, edit, expected):
    edit(model := Path(shutil.copytree(small, tmp_path / "model")))
    with pytest.raises(FlexQuantError, match=expected):
        quantize(model, tmp_path / "variants")
    assert not (tmp_path / "variants").exists()


def test_activations_that_overflow_are_blamed_on_their_layer(tmp_path: Path) -> None:
    def overflow(state: StateDict) -> StateDict:
        state["model.layers.1.input_layernorm.weight"][:] = 3e38
        return state

    model = make_checkpoint(tmp_path / "model", scheme=None, transform=overflow)
    with pytest.raises(FlexQuantError, match=r"activations of model\.layers\.1 have NaN or infinite values"):
        quantize(model, tmp_path / "variants", recipe(w4a16=W4A16))
    assert not list(tmp_path.glob("variants/*"))


LITTLE_MEMORY = """
import resource, sys
import torch
from transformers.utils.import_utils import KERNELS_MIN_VERSION
torch.set_num_threads(1)
from tests.quantize.quantizing import W4A16, quantize, recipe
model, output = sys.argv[1:]
quantize(model, output + "/warm", recipe(w4a16=W4A16), samples=2, length=16)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
quantize(model, output + "/cold", recipe(w4a16=W4A16), samples=2, length=4096)
"""


# It finds out-of-memory errors that a release of torch or llmcompressor words anew.
@pytest.mark.full
def test_running_out_of_memory_says_what_to_lower(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, max_position_embeddings=4096)
    command = [sys.executable, "-c", LITTLE_MEMORY, str(model), str(tmp_path)]
    said = "FlexQuantError: the memory ran out while quantising 'w4a16'; lower --samples or --length"
    assert said in programs.run(command, timeout=300, status=1).stderr
    assert not list(tmp_path.glob("cold/*"))


def test_arguments_that_llmcompressor_refuses_are_explained(model: Path, tmp_path: Path) -> None:
    arguments = {**RTN["QuantizationModifier"], "weight_observer": "no_such_observer"}
    with pytest.raises(FlexQuantError, match="no_such_observer"):
        quantize(model, tmp_path / "variants", recipe(w8a8={"QuantizationModifier": arguments}))


def test_without_llmcompressor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "llmcompressor" else find_spec(name, *a)
    )
    assert cli.main(["quantize", str(model), "--output", str(tmp_path / "variants")]) == 1
    assert "install flexquant[quantize] in an environment of its own" in capsys.readouterr().err


# It finds what a release of transformers loads by a name in a configuration.
@pytest.mark.full
def test_what_a_models_files_name_is_neither_fetched_nor_run(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", scheme=None, num_layers=1)
    for name in "ab":
        shutil.copytree(made, tmp_path / "quantize" / name)
    found = run_all(tmp_path, KERNELS_MIN_VERSION, ["quantize"])["quantize"]
    for key, (status, said, touched) in found.items():
        assert not touched, key
        assert status == 0 or (key in MAY_REFUSE and "flexquant quantize: error: " in said), (key, said)
