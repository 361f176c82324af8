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
from tests.checkpoints import StateDict
from tests.foreign import config_of, tensors_of, write_foreign
from tests.publishers import edits
from tests.quantised_heads import GROUP, HEAD, write_pair

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


def short_head(state: StateDict) -> StateDict:
    return state | {f"{HEAD}.weight": state[f"{HEAD}.weight"][:-8].clone()}


def own_head(state: StateDict) -> StateDict:
    return state | {f"{HEAD}.weight": state["model.embed_tokens.weight"].clone()}


@pytest.mark.parametrize(
    ("heads", "options", "edit", "said"),
    [
        (TWICE, {}, of_head("weight_scale", lambda t: t * torch.nan), "holds NaN or infinite"),
        (("w8a16", "w4a16"), {}, of_head("weight_packed", lambda t: t.flip(0)), "makes other logits"),
        (TWICE, {}, of_head("weight_shape", lambda t: t - 8), "does not fit"),
        (TWICE, {}, edits.without(HEAD), "quantises lm_head, which no file holds|has parameter"),
        (TWICE, {}, edits.section(config_groups={}), "no config group"),
        (TWICE, {"transform": short_head}, None, r"'lm_head.weight' has shape \[312, 128\]"),
        (TWICE, {"transform": own_head, "tie_word_embeddings": True}, None, "tie_word_embeddings"),
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
