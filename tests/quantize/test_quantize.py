# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantising a small random model with llmcompressor: configs, what is smoothed, repeatability, errors."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file

from flexquant import cli
from flexquant.errors import FlexQuantError
from flexquant.quantization.variants import quantize
from flexquant.quantization.schemes import choose_group_size, smoothing_mappings
from tests import readme
from tests.checkpoints import make_checkpoint

FEW: dict[str, Any] = {"samples": 4, "length": 64}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", scheme=None)


@pytest.fixture(scope="module")
def variants(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quantised") / "variants"
    quantize(model, output, **FEW)
    return output


def section(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def weight(folder: Path, name: str) -> torch.Tensor:
    """The dequantised weight [out, in]."""
    tensors = load_file(folder / "model.safetensors")
    if f"{name}.weight_packed" in tensors:
        q = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, tensors[f"{name}.weight_shape"])
    else:
        q = tensors[f"{name}.weight"]
    if f"{name}.weight_scale" not in tensors:
        return q.float()
    scale = tensors[f"{name}.weight_scale"].float()
    return q.float() * scale.repeat_interleave(q.shape[1] // scale.shape[1], dim=1)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_w8a8_is_int8_per_channel_with_dynamic_per_token_activations(variants: Path) -> None:
    (group,) = section(variants / "w8a8")["config_groups"].values()
    weights, activations = group["weights"], group["input_activations"]
    assert (weights["num_bits"], weights["strategy"], weights["symmetric"]) == (8, "channel", True)
    assert (activations["num_bits"], activations["strategy"], activations["dynamic"]) == (8, "token", True)
    assert section(variants / "w8a8")["format"] == "int-quantized"


def test_w4a16_is_int4_in_groups_without_a_group_index(variants: Path) -> None:
    (group,) = section(variants / "w4a16")["config_groups"].values()
    weights = group["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 128, True)
    assert group["input_activations"] is None
    assert not any(name.endswith("g_idx") for name in load_file(variants / "w4a16" / "model.safetensors"))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_everything_else_stays_in_the_source_dtype(model: Path, variants: Path, scheme: str) -> None:
    assert section(variants / scheme)["ignore"] == ["lm_head"]
    source = load_file(model / "model.safetensors")
    tensors = load_file(variants / scheme / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], source["lm_head.weight"])
    assert torch.equal(tensors["model.embed_tokens.weight"], source["model.embed_tokens.weight"])
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
    assert json.loads((variants / scheme / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_files_beside_the_weights_are_the_source_s(model: Path, variants: Path, scheme: str) -> None:
    for name in TOKENIZER_FILES:
        assert (variants / scheme / name).read_bytes() == (model / name).read_bytes()
    assert (variants / scheme / "recipe.yaml").is_file()
    assert sorted(p.name for p in variants.iterdir()) == ["w4a16", "w8a8"]


def test_only_norms_are_smoothed_so_that_v_stays(model: Path, variants: Path) -> None:
    source = load_file(model / "model.safetensors")
    w8a8 = load_file(variants / "w8a8" / "model.safetensors")
    for layer in ("model.layers.0", "model.layers.1"):
        for norm, readers in {
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        }.items():
            name = f"{layer}.{norm}.weight"
            assert relative_error(w8a8[name].float(), source[name].float()) > 0.1
            for reader in readers:
                # What the layer computes is the norm's weight times the linear's: that product stays.
                folded = weight(variants / "w8a8", f"{layer}.{reader}") * w8a8[name].float()
                expected = source[f"{layer}.{reader}.weight"].float() * source[name].float()
                assert relative_error(folded, expected) < 0.03, reader
        for linear in ("self_attn.o_proj", "mlp.down_proj"):
            quantised = weight(variants / "w8a8", f"{layer}.{linear}")
            assert relative_error(quantised, source[f"{layer}.{linear}.weight"].float()) < 0.03, linear


def test_w4a16_is_not_smoothed(model: Path, variants: Path) -> None:
    source, w4a16 = (load_file(f / "model.safetensors") for f in (model, variants / "w4a16"))
    for name in source:
        if "norm" in name:
            assert torch.equal(w4a16[name], source[name])


def test_the_quantised_model_computes_what_the_source_computes(model: Path, variants: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([list(b"def quantize(model, output): ...")])

    def logits(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits

    # Logits of unrelated models differ by about 1.4. Random weights have no outliers and few samples leave
    # GPTQ little to go by, so this tells a broken checkpoint from a sound one and says nothing on quality.
    expected = logits(model)
    assert relative_error(logits(variants / "w8a8"), expected) < 0.1
    assert relative_error(logits(variants / "w4a16"), expected) < 0.8


def test_gemma_s_offset_norms_are_smoothed_right(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "gemma", "gemma3", scheme=None)
    (result,) = quantize(model, tmp_path / "variants", ["w8a8"], **FEW)
    assert result.smoothed
    source = load_file(model / "model.safetensors")
    w8a8 = load_file(tmp_path / "variants/w8a8/model.safetensors")
    layer = "model.layers.0"
    for norm, reader in {
        "input_layernorm": "self_attn.v_proj",
        "pre_feedforward_layernorm": "mlp.up_proj",
    }.items():
        name = f"{layer}.{norm}.weight"
        folded = weight(tmp_path / "variants/w8a8", f"{layer}.{reader}") * (1 + w8a8[name].float())
        expected = source[f"{layer}.{reader}.weight"].float() * (1 + source[name].float())
        assert relative_error(folded, expected) < 0.03
    for norm in ("post_attention_layernorm", "post_feedforward_layernorm", "self_attn.k_norm"):
        name = f"{layer}.{norm}.weight"
        assert torch.equal(w8a8[name], source[name])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "mistral"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    model = make_checkpoint(tmp_path / "model", architecture, scheme=None, num_layers=1)
    results = quantize(model, tmp_path / "variants", **FEW)
    assert [(r.scheme, r.smoothed, r.group_size) for r in results] == [
        ("w8a8", True, None),
        ("w4a16", False, 128),
    ]


def test_unknown_architectures_are_not_smoothed() -> None:
    assert smoothing_mappings("olmo2") == []


def test_same_inputs_give_the_same_bytes(model: Path, variants: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "again", **FEW)
    assert digests(tmp_path / "again") == digests(variants)


@pytest.mark.parametrize(
    ("features", "size"), [((128, 256), 128), ((576, 1536), 64), ((576, 96), 32), ((896, 4864), 128)]
)
def test_the_largest_group_size_that_divides_all(features: tuple[int, ...], size: int) -> None:
    assert choose_group_size({f"layer{i}": k for i, k in enumerate(features)}) == size


def test_smaller_groups_reach_the_config(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, intermediate_size=192)
    (result,) = quantize(model, tmp_path / "variants", ["w4a16"], **FEW)
    (group,) = section(tmp_path / "variants/w4a16")["config_groups"].values()
    assert group["weights"]["group_size"] == result.group_size == 64


def test_a_linear_that_no_group_size_divides_is_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1, intermediate_size=200)
    with pytest.raises(
        FlexQuantError, match=r"layers\.0\.mlp\.down_proj has 200 input features.*128, 64, 32"
    ):
        quantize(model, tmp_path / "variants", **FEW)
    assert not (tmp_path / "variants").exists()


def test_calibration_on_text_and_on_messages(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "prose.txt"
    text.write_text("A paragraph of prose.\n\nAnd another one.\n" * 20)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello there! " * 100}]}))
    quantize(model, tmp_path / "text", ["w4a16"], text, **FEW)
    with pytest.raises(FlexQuantError, match="no chat template"):
        quantize(model, tmp_path / "chats", ["w4a16"], chats, **FEW)
    with_template = tmp_path / "with_template"
    with_template.mkdir()
    for file in model.iterdir():
        (with_template / file.name).write_bytes(file.read_bytes())
    (with_template / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    quantize(with_template, tmp_path / "chats", ["w4a16"], chats, **FEW)
    assert (tmp_path / "chats/w4a16/chat_template.jinja").is_file()
    assert (
        digests(tmp_path / "text")["w4a16/model.safetensors"]
        != digests(tmp_path / "chats")["w4a16/model.safetensors"]
    )


def test_errors(model: Path, variants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(FlexQuantError, match=match):
            quantize(*args, **{**FEW, **options})

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output, empty = tmp_path / "out", tmp_path / "empty.txt"
    empty.touch()
    refused("'w3a3' is not a quantisation scheme; allowed are w8a8, w4a16", model, output, ["w3a3"])
    refused("no quantisation scheme", model, output, [])
    refused("neither a folder nor a Hugging Face model", tmp_path / "missing", output)
    refused("has no config.json", tmp_path, output)
    refused("is quantised already", variants / "w8a8", output)
    refused("w8a8 exists; .*--overwrite", model, variants)
    refused("overlaps the input", model, model)
    refused("has 0 tokens, but 4 samples of 64 tokens need 256", model, output, calibration=empty)
    refused("neither a file nor a Hugging Face dataset", model, output, calibration=tmp_path / "missing.txt")
    assert not output.exists()


def test_overwrite_replaces_a_variant(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "variants"
    quantize(model, output, ["w4a16"], **FEW)
    before = digests(output)
    quantize(model, output, ["w4a16"], **FEW, seed=1, overwrite=True)
    assert before.keys() == digests(output).keys()
    assert before != digests(output)


def test_an_interrupted_run_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexquant.quantization.variants.copy_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "variants", ["w4a16"], **FEW)
    assert list((tmp_path / "variants").iterdir()) == []


def test_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--schemes", "w4a16", "--samples", "4", "--length", "64", "--json"]
    assert cli.main(["quantize", str(model), "--output", str(tmp_path / "variants"), *options]) == 0
    *summary, last = capsys.readouterr().out.splitlines()
    assert len(summary) == 1 and "groups of 128" in summary[0]
    (variant,) = json.loads(last)["variants"].values()
    assert variant["num_bytes"] == (tmp_path / "variants/w4a16/model.safetensors").stat().st_size


def test_without_llmcompressor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "llmcompressor" else find_spec(name, *a)
    )
    assert cli.main(["quantize", str(model), "--output", str(tmp_path / "variants")]) == 1
    assert "install flexquant[quantize] in an environment of its own" in capsys.readouterr().err


def test_the_readmes_command(model, tmp_path, monkeypatch):
    (command,) = [c for c in readme.commands() if c.startswith("flexquant quantize")]
    (tmp_path / "my-model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    few = [argument for key, value in FEW.items() for argument in (f"--{key}", str(value))]
    assert cli.main([*shlex.split(command)[1:], *few]) == 0
    assert {p.name for p in (tmp_path / "my-variants").iterdir()} == {"w8a8", "w4a16"}
