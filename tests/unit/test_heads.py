# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Heads, tied, own or quantised, with the final norm: the logits have to be the same in all variants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexquant.checkpoint.built_model import written_or_default
from flexquant.checkpoint.merged_config import MergedConfig, has_int4, read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.merge.formats import open_source
from flexquant.merge.kv.compatibility import KVReport, check_kv_compatibility
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from flexquant.serving.worker.weights import VariantLoader
from tests.checkpoints import StateDict, Transform, fold_final_norm, make_pair
from tests.foreign import config_of, tensors_of, write_foreign
from tests.publishers import edits
from tests.quantised_heads import GROUP, write_pair
from tests.refusals import refused
from tests.tied_heads import EMBEDDING, HEAD, NORM, make_tied_pair
from tests.unit.edits import Edit, edit_tensor, in_float32, rotate_residual
from tests.unit.full_merge import opened

COPY, OTHER = "copy", "other"
WEIGHT = f"{HEAD}.weight"


def merged(tmp_path: Path, *heads: str | None, **options: Any) -> MergedConfig:
    sources = make_tied_pair(tmp_path, *heads, **options)
    merge_checkpoints(sources, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", sources)
    return read_merged_config(tmp_path / "merged")[0]


@pytest.mark.parametrize(
    ("heads", "own", "shared"),
    [
        ((OTHER, "another"), (True, True), False),
        ((OTHER, OTHER), (True, True), True),
        ((OTHER, None), (True, False), False),
        ((OTHER, COPY), (True, False), False),
        ((None, COPY), (False, False), True),
        ((COPY, COPY), (False, False), True),
        ((None, None), (False, False), True),
    ],
)
def test_a_head_is_its_variants_own_unless_it_is_the_embedding(tmp_path, heads, own, shared):
    found = merged(tmp_path, *heads)
    assert tuple(variant.own_head for variant in found.variants.values()) == own
    assert (HEAD in found.shared_modules) is shared and EMBEDDING in found.shared_modules


def test_a_model_in_16_bit_has_the_head_that_one_variant_has(tmp_path):
    sources = make_tied_pair(tmp_path, OTHER, None)
    report = merge_checkpoints(sources, tmp_path / "merged")
    with_head, without = (report.variants[name].parameters for name in sources)
    assert with_head - without == 320 * 128 and report.bytes_16bit == 2 * with_head


def test_a_copy_of_the_embedding_comes_back_when_split(tmp_path):
    merged(tmp_path, None, COPY)
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "again")
    again, source = (tmp_path / name / "model.safetensors" for name in ("again", "w4a16"))
    assert f'"{HEAD}.weight"'.encode() in again.read_bytes()
    assert again.stat().st_size == source.stat().st_size


def test_a_head_of_another_shape_is_refused(tmp_path):
    with refused("'lm_head.weight' has shape"):
        merged(tmp_path, OTHER, "short")


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_config_without_the_key_is_tied_where_its_class_says_so(tmp_path, architecture):
    found = merged(tmp_path, None, None, architecture=architecture, key=False)
    assert HEAD in found.shared_modules
    assert not any(variant.own_head for variant in found.variants.values())


def test_a_config_without_the_key_is_not_tied_where_its_class_says_so(tmp_path):
    with refused("'w8a8' has parameter 'lm_head.weight' and 'w4a16' does not"):
        merged(tmp_path, COPY, None, key=False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gemma"}, True),
        ({"model_type": "starcoder2"}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma", "tie_word_embeddings": False}, False),
        ({"model_type": "gemma", "tie_word_embeddings": None}, None),
        ({"model_type": "of nobody"}, None),
        ({"model_type": "of nobody", "tie_word_embeddings": True}, True),
        ({}, None),
        ({"model_type": "gemma", "hidden_size": "wide"}, None),
    ],
)
def test_what_a_config_leaves_out_is_the_default_of_its_class(config, expected):
    assert written_or_default(config, "tie_word_embeddings") is expected


def test_a_shared_head_is_loaded_for_all(tmp_path):
    sources = make_pair(tmp_path)
    merge_checkpoints(sources, tmp_path / "merged")
    found, _ = read_merged_config(tmp_path / "merged")
    routes = build_route_table(load_policy("phase"), sources, num_layers=2, max_tokens=64)
    loader = VariantLoader({name: torch.nn.Module() for name in sources}, found, routes)
    assert found.shared_modules[0] == HEAD and loader.wants(f"shared.{HEAD}.weight")


def compared(tmp_path, edit: Edit, architecture: str = "llama", **overrides) -> KVReport:
    return check_kv_compatibility(opened(make_pair(tmp_path, architecture, in_float32(edit), **overrides)))


def folded(state: StateDict) -> None:
    state.update(fold_final_norm(state))


def folded_into_one_plus_weight(state: StateDict) -> None:
    state[WEIGHT] = state[WEIGHT] * (1 + state[NORM])
    state[NORM] = torch.zeros_like(state[NORM])


def rotated_but_for_the_head(state: StateDict) -> None:
    head, norm = state[WEIGHT].clone(), state[NORM].clone()
    rotate_residual(state)
    state |= {WEIGHT: head, NORM: norm}


@pytest.mark.parametrize("architecture, edit", [("llama", folded), ("gemma3", folded_into_one_plus_weight)])
def test_a_norm_that_is_folded_into_the_head_changes_nothing(tmp_path, architecture, edit):
    found = compared(tmp_path, edit, architecture, tie_word_embeddings=False)
    assert found.layered_plans, found.message


def test_a_rotation_that_takes_the_head_along_changes_nothing(tmp_path):
    assert compared(tmp_path, rotate_residual).compatible


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (edit_tensor("^lm_head", torch.randn_like), "lm_head"),
        (edit_tensor("^lm_head", lambda w: torch.cat([w[:-1], w[-1:] * 1.3])), "gain error of row 319"),
        (edit_tensor("^lm_head", lambda w: w[torch.randperm(len(w))]), "lm_head"),
        (edit_tensor(r"^model\.norm", lambda w: 2 * w), "lm_head, with the norm before it"),
        (edit_tensor(r"^model\.norm", lambda w: w * (0.8 + 0.4 * torch.rand_like(w))), "the norm before it"),
        (rotated_but_for_the_head, "norm, behind the layers, computes something else"),
    ],
    ids=["another head", "one token", "tokens in another order", "norm doubled", "norm changed", "rotated"],
)
def test_other_logits_are_those_of_another_model(tmp_path, edit, named):
    message = compared(tmp_path, edit).message
    assert named in message and "not copies of one model" in message


def test_a_bias_of_the_last_norm_has_to_be_equal_but_may_be_rounded_to_another_dtype(tmp_path):
    """The factors of the norm's outputs hide what is added in one column."""
    edit = edit_tensor(r"^model\.norm\.bias", lambda b: torch.cat([b[:1] + 0.3, b[1:]]))
    assert "norm, behind the layers, computes something else" in compared(tmp_path, edit, "stablelm").message
    edit = edit_tensor(r"^model\.norm\.bias", lambda b: b * (1 + 2.0**-8))
    assert compared(tmp_path / "rounded", edit, "stablelm").compatible


@pytest.mark.parametrize("edited", ["norm", "embedding"])
def test_a_tied_model_is_compared_by_its_embedding(tmp_path, edited):
    edit = edit_tensor(r"^model\.norm", lambda w: 2 * w) if edited == "norm" else (lambda state: None)
    found = compared(tmp_path, edit, tie_word_embeddings=True)
    assert found.compatible is (edited == "embedding")
    assert ("model.embed_tokens, with the norm before it" in found.message) is (edited == "norm")


TWICE, ZERO_POINTS = ("w8a16", "w8a16"), ("w4a16 with zero points",) * 2


def is_shared(folder: Path, sources: dict[str, Path]) -> bool:
    """Merge into ``folder``, and return whether the head is stored once."""
    merge_checkpoints(sources, folder)
    verify_checkpoint(folder, sources)
    merged, _ = read_merged_config(folder)
    assert merged.layered_plans
    prefixes = {key.partition(".")[0] for key in tensors_of(folder) if f".{HEAD}." in key}
    assert (prefixes == {"shared"}) >= (HEAD in merged.shared_modules)
    return HEAD in merged.shared_modules


@pytest.mark.parametrize("form", ["w8a16", "w4a16", "w4a16 by channel", ZERO_POINTS[0], "w8a8", "fp8"])
def test_equal_heads_are_stored_once(form: str, tmp_path: Path) -> None:
    assert is_shared(tmp_path / "merged", write_pair(tmp_path, form, form))


@pytest.mark.parametrize(
    "heads", [("w8a8", "fp8"), ("w8a16", None), (None, "w4a16"), ("w4a16", "w4a16 in 32")]
)
def test_each_variant_can_have_its_own_head(heads: tuple[str | None, ...], tmp_path: Path) -> None:
    sources = write_pair(tmp_path, *heads)
    assert not is_shared(tmp_path / "merged", sources)
    assert [has_int4(config_of(folder), "it") for folder in sources.values()] == [False, True]


def test_a_head_that_two_variants_multiply_in_two_ways_is_not_shared(tmp_path: Path) -> None:
    def with_16_bit_activations(config: dict) -> None:
        config["quantization_config"]["config_groups"][GROUP]["input_activations"] = None

    sources = write_pair(tmp_path, "fp8", "fp8")
    edits.edit_json("config.json", with_16_bit_activations)(sources["w4a16"])
    assert not is_shared(tmp_path / "merged", sources)


def test_a_head_of_gptq_is_a_target_by_its_name(tmp_path: Path) -> None:
    sources = write_pair(tmp_path, None, "w4a16")
    gptq = write_foreign(sources["w4a16"], tmp_path / "gptq", "gptq", lm_head=True)
    section = open_source("w4a16", gptq).quantization_config
    (group,) = section["config_groups"].values()
    assert group["targets"] == ["Linear", HEAD] and HEAD not in section["ignore"]
    assert not is_shared(tmp_path / "merged", sources | {"w4a16": gptq})


def of_head(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> edits.Edit:
    key = f"{HEAD}.{part}"
    return edits.tensors(lambda state: state.update({key: change(state[key])}))


def head_from(key: str, rows: int | None = None) -> Transform:
    return lambda state: state | {WEIGHT: state[key][:rows].clone()}


THOUGH_TIED = {"transform": head_from(f"{EMBEDDING}.weight"), "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("heads", "options", "edit", "said"),
    [
        (TWICE, {}, of_head("weight_scale", lambda t: t * torch.nan), "holds NaN or infinite"),
        (("w8a16", "w4a16"), {}, of_head("weight_packed", lambda t: t.flip(0)), "makes other logits"),
        (TWICE, {}, of_head("weight_shape", lambda t: t - 8), "does not fit"),
        (TWICE, {}, edits.without(HEAD), "quantises lm_head, which no file holds|has parameter"),
        (TWICE, {}, edits.section(config_groups={}), "no config group"),
        (TWICE, {"transform": head_from(WEIGHT, -8)}, None, r"'lm_head.weight' has shape \[312, 128\]"),
        (TWICE, THOUGH_TIED, None, "tie_word_embeddings"),
        (ZERO_POINTS, {"vocab_size": 330}, None, "for multiples of 8 rows, not for 330"),
    ],
)
def test_what_is_refused(heads, options, edit, said, tmp_path: Path) -> None:
    sources = write_pair(tmp_path, *heads, **options)
    if edit is not None:
        edit(sources["w4a16"])
    with pytest.raises(FlexQuantError, match=said):
        merge_checkpoints(sources, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
