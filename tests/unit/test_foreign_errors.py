# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Malformed settings and tensors of checkpoints that others made end in a message, never in a traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from pydantic import TypeAdapter

from flexquant.checkpoint.safetensors_io import CHUNK_BYTES, ComputedTensor, read_chunks
from flexquant.errors import said_by
from flexquant.merge import convert_checkpoint, merge_checkpoints
from flexquant.merge.formats import Source, open_source, with_dtype
from flexquant.merge.merge_plan import plan_merge
from flexquant.merge.packed_formats import PackedFormat, read_settings
from tests.checkpoints import make_checkpoint
from tests.foreign import awq_tensors, write_foreign
from tests.publishers import edits
from tests.publishers.shapes import GPTQ_AS_AUTO_ROUND
from tests.refusals import refused

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("method", "settings", "named"),
    [
        *(
            ("gptq", {**GPTQ_AS_AUTO_ROUND, **own}, named)
            for own, named in (
                ({"extra_config": "x"}, "extra_config 'x', expected an object"),
                ({"extra_config": {UP: 1}}, "extra_config {.*}, expected an object"),
                ({"extra_config": {UP: {"bits": "4"}}}, "extra_config .*, expected an object"),
                ({"extra_config": {UP: {"bits": 2}}}, "1 layers with settings of their own"),
                ({"packing_format": "auto_round:fp8"}, "AutoRound in FP8 with .*data_type 'int'"),
                ({"data_type": "mx_fp"}, "data_type mx_fp"),
                ({"sym": False}, "sym False"),
                ({"sym": "yes"}, "sym 'yes', expected true or false"),
            )
        ),
        ("gptq", {"sym": "false"}, "sym 'false', expected true or false"),
        ("gptq", {"desc_act": "no"}, "desc_act 'no', expected true or false"),
        ("awq", {"zero_point": 1}, "zero_point 1, expected true or false"),
        ("gptq", {"bits": "four"}, "bits 'four', expected a whole number"),
        ("gptq", {"bits": True}, "bits True, expected a whole number"),
        ("gptq", {"bits": 3}, "has 3 bits a weight; of gptq only 4 and 8 are read"),
        ("awq", {"group_size": [64]}, r"group_size \[64\], expected a whole number"),
        ("awq", {"group_size": -1}, "has group_size -1, expected a number of inputs or, for GPTQ, -1"),
    ],
)
def test_settings_that_are_not_served_are_refused(method, settings, named, w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "foreign", method, **settings)
    with refused(named):
        open_source("w4a16", foreign)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_null_stands_for_the_default(method, w4a16, tmp_path):
    nulls = dict.fromkeys(("sym", "desc_act", "zero_point", "dynamic", "checkpoint_format"))
    open_source("w4a16", write_foreign(w4a16, tmp_path / "foreign", method, **nulls))


def test_a_section_that_is_no_object_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "model", scheme=None, num_layers=1)
    edits.config(quantization_config="awq")(folder)
    with refused("quantization_config 'awq', expected an object"):
        open_source("bf16", folder)


def test_converting_says_what_it_was_wherever_the_settings_are(w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "foreign", "gptq")
    edits.settings_in("quantize_config.json")(foreign)
    assert convert_checkpoint(foreign, tmp_path / "converted")["from"] == "gptq"


@pytest.mark.parametrize("part", ["weight", "weight_packed"])
def test_a_linear_that_is_stored_twice_is_refused(part, w4a16, tmp_path):
    foreign = write_foreign(w4a16, tmp_path / "foreign", "gptq")
    edits.tensors(lambda s: s.update({f"{UP}.{part}": torch.zeros(256, 16, dtype=torch.int32)}))(foreign)
    with refused(rf"{UP}.{part} beside {UP}.qweight"):
        open_source("w4a16", foreign)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.pop(f"{UP}.weight_scale_inv"), rf"{UP}.weight_scale_inv is missing"),
        (
            lambda state: state.update({f"{UP}.weight_scale": torch.ones(8, 4)}),
            rf"both {UP}.weight_scale_inv and {UP}.weight_scale",
        ),
    ],
)
def test_block_fp8_needs_one_scale_of_each_linear(change, named, tmp_path):
    folder = make_checkpoint(tmp_path / "fp8", scheme=None, num_layers=1)
    edits.block_fp8(folder)
    open_source("fp8", folder)
    edits.tensors(change)(folder)
    with refused(named):
        open_source("fp8", folder)


def test_a_single_variant_without_its_quantisation_config_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "w8a8", num_layers=1)
    edits.config(quantization_config=None)(folder)
    with refused("is stored as I8, but no config group quantises it"):
        merge_checkpoints({"w8a8": folder}, tmp_path / "merged")


def test_a_dtype_that_is_asked_for_is_one_of_16_bit_and_stated_everywhere(w4a16, tmp_path):
    with refused("dtype 'int8'; take bfloat16 or float16"):
        open_source("w4a16", w4a16, "int8")
    folder = make_checkpoint(tmp_path / "w8a8", num_layers=1)
    edits.config(torch_dtype="bfloat16", dtype="bfloat16")(folder)
    config = open_source("w8a8", folder, "float16").config
    assert (config["dtype"], config["torch_dtype"]) == ("float16", "float16")
    nested = {"dtype": "bfloat16", "vocab_size": 8}
    in_half = {"dtype": "float16", "text_config": {"dtype": "float16", "vocab_size": 8}}
    assert with_dtype({"text_config": nested}, "float16") == in_half
    assert nested["dtype"] == "bfloat16"


@pytest.mark.parametrize("inputs", [8, 256, 264, 640])
def test_weights_of_awq_are_repacked_in_parts(inputs):
    values = torch.randint(0, 16, (24, inputs))
    ones = torch.ones(24, 1, dtype=torch.int64)
    stored = awq_tensors(values, ones, ones)["qweight"]
    packed = PackedFormat("awq", 4, 8, symmetric=False).pack_weight(stored)
    assert torch.equal(unpack_from_int32(packed, 4, torch.Size((24, inputs))) + 8, values)


def test_a_nested_dtype_that_differs_is_told_with_the_way_on():
    def source(name: str, dtype: str) -> Source:
        config = {"architectures": ["A"], "dtype": dtype, "text_config": {"dtype": dtype}}
        return Source(name, Path(name), config, {}, {})

    with refused("dtype: 'bfloat16' against 'float16'; text_.*--dtype bfloat16"):
        plan_merge([source("w8a8", "bfloat16"), source("w4a16", "float16")])


@pytest.mark.parametrize(("size", "reordered"), [(-1, False), (64, True)])
def test_one_group_for_all_inputs_has_no_order(size, reordered):
    """vLLM serves desc_act where it means nothing."""
    section = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": True}
    assert read_settings(Path("model"), section).reordered is reordered


def test_rows_that_are_longer_than_a_chunk_are_computed_once(tmp_path):
    data = torch.arange(4 * CHUNK_BYTES, dtype=torch.int32).view(4, -1, 128)
    asked: list[Any] = []

    def compute(rows: Any) -> torch.Tensor:
        asked.append(rows)
        return torch.cat([data[part.start : part.stop] for part in rows])

    tensor = ComputedTensor("x", "I32", tuple(data.shape), tmp_path / "x", 0, compute)
    chunks = [bytes(chunk) for chunk in read_chunks(tensor)]
    assert b"".join(chunks) == data.numpy().tobytes()
    assert {len(chunk) for chunk in chunks} == {CHUNK_BYTES} and len(asked) == 4


def error_of(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


GROUPS = TypeAdapter(dict[str, int | list[str]])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("Unknown class.\nIt should be one of A, B."), "Unknown class."),
        (
            ValueError("Refused by 'layers':\n    ValueError: 4 are too many\n"),
            "Refused by 'layers': ValueError: 4 are too many",
        ),
        (AssertionError(), "AssertionError"),
        (ValueError("word " * 99), "word " * 60 + "..."),
        (ValueError("x" * 999), "x" * 300 + " ..."),
        (
            error_of(lambda: GROUPS.validate_python({"groups": "x"})),
            "groups.int: Input should be a valid integer, unable to parse string as an integer; "
            "groups: Input should be a valid list",
        ),
        (
            error_of(lambda: transformers.AutoModelForCausalLM.from_config(transformers.CLIPTextConfig())),
            f"Unrecognized configuration class {transformers.CLIPTextConfig} for this kind of AutoModel: "
            "AutoModelForCausalLM.",
        ),
    ],
)
def test_of_what_a_library_says_its_point_is_shown(error, said):
    assert said_by(error) == said
