# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Published checkpoints whose lm_head is quantised: what a merge stores once, takes and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexquant.checkpoint.merged_config import has_int4, read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, verify_checkpoint
from flexquant.merge.formats import open_source
from tests.checkpoints import StateDict, make_checkpoint
from tests.foreign import config_of, tensors_of, write_foreign
from tests.publishers import edits
from tests.quantised_heads import HEAD, quantise_head, write_pair

FORMS = ("w8a16", "w4a16", "w4a16 by channel", "w4a16 with zero points", "w8a8", "fp8")


@pytest.mark.parametrize("form", FORMS)
def test_equal_heads_are_stored_once(form: str, tmp_path: Path) -> None:
    sources = write_pair(tmp_path, form, form)
    merge_checkpoints(sources, tmp_path / "merged")
    verify_checkpoint(tmp_path / "merged", sources)
    found, _ = read_merged_config(tmp_path / "merged")
    stored = {key.partition(".")[0] for key in tensors_of(tmp_path / "merged") if f".{HEAD}." in key}
    assert HEAD in found.shared_modules and stored == {"shared"} and found.layered_plans


@pytest.mark.parametrize(
    "heads", [("w8a8", "fp8"), ("w8a16", None), (None, "w4a16"), ("w4a16", "w4a16 in 32")]
)
def test_each_variant_can_have_its_own_head(heads: tuple[str | None, ...], tmp_path: Path) -> None:
    sources = write_pair(tmp_path, *heads)
    merge_checkpoints(sources, tmp_path / "merged")
    found, _ = read_merged_config(tmp_path / "merged")
    assert HEAD not in found.shared_modules and found.layered_plans


def test_a_head_that_two_variants_multiply_in_two_ways_is_not_shared(tmp_path: Path) -> None:
    sources = write_pair(tmp_path, "fp8", "fp8")
    edit = {"of_the_head": {"input_activations": None}}
    edits.edit_json(
        "config.json",
        lambda config: [
            config["quantization_config"]["config_groups"][name].update(change)
            for name, change in edit.items()
        ],
    )(sources["w4a16"])
    merge_checkpoints(sources, tmp_path / "merged")
    assert HEAD not in read_merged_config(tmp_path / "merged")[0].shared_modules


def test_heads_of_gptq_are_targets_by_their_name(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", scheme="w4a16")
    source = write_foreign(
        quantise_head(made, tmp_path / "w4a16", "w4a16"), tmp_path / "gptq", "gptq", lm_head=True
    )
    section = open_source("w4a16", source).quantization_config
    (group,) = section["config_groups"].values()
    assert group["targets"] == ["Linear", HEAD] and HEAD not in section["ignore"]
    merge_checkpoints({"w4a16": source}, tmp_path / "merged")


def test_a_head_in_int4_makes_no_variant_in_int4(tmp_path: Path) -> None:
    sources = write_pair(tmp_path, "w4a16", "w8a16")
    assert [has_int4(config_of(folder), "it") for folder in sources.values()] == [False, True]


def of_head(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> edits.Edit:
    key = f"{HEAD}.{part}"
    return edits.tensors(lambda state: state.update({key: change(state[key])}))


def short_head(state: StateDict) -> StateDict:
    return state | {f"{HEAD}.weight": state[f"{HEAD}.weight"][:-8].clone()}


def own_head(state: StateDict) -> StateDict:
    return state | {f"{HEAD}.weight": state["model.embed_tokens.weight"].clone()}


@pytest.mark.parametrize(
    ("heads", "options", "edit", "said"),
    [
        (("w8a16", "w8a16"), {}, of_head("weight_scale", lambda t: t * torch.nan), "holds NaN or infinite"),
        (
            ("w8a16", "w4a16"),
            {"transform": None},
            of_head("weight_packed", lambda t: t.flip(0)),
            "makes other logits",
        ),
        (("w8a16", "w8a16"), {}, of_head("weight_shape", lambda t: t - 8), "does not fit"),
        (("w8a8", "w8a8"), {}, edits.without(f"{HEAD}.*"), "has parameter"),
        (
            ("w8a16", "w8a16"),
            {"transform": own_head, "tie_word_embeddings": True},
            None,
            "tie_word_embeddings",
        ),
        (("w8a16", "w8a16"), {"transform": short_head}, None, r"'lm_head.weight' has shape \[312, 128\]"),
        (("w4a16 with zero points",) * 2, {"vocab_size": 330}, None, "for multiples of 8 rows, not for 330"),
        (("w8a16", "w8a16"), {}, edits.section(config_groups={}), "no config group"),
    ],
)
def test_what_is_refused(heads, options, edit, said, tmp_path: Path) -> None:
    sources = write_pair(tmp_path, *heads, **options)
    if edit is not None:
        edit(sources["w4a16"])
    with pytest.raises(FlexQuantError, match=said):
        merge_checkpoints(sources, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
