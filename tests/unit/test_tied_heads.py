# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging models whose config ties the lm_head to the embedding, whatever heads their files hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexquant.checkpoint.built_model import written_or_default
from flexquant.checkpoint.merged_config import MergedConfig, read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint, verify_checkpoint
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from flexquant.serving.worker.weights import VariantLoader
from tests.checkpoints import make_checkpoint
from tests.tied_heads import EMBEDDING, HEAD, make_tied, without_key

COPY, OTHER = "copy", "other"


def merged(tmp_path: Path, **heads: str | None) -> MergedConfig:
    sources = {name: make_tied(tmp_path / name, name, head) for name, head in heads.items()}
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
    found = merged(tmp_path, w8a8=heads[0], w4a16=heads[1])
    assert tuple(variant.own_head for variant in found.variants.values()) == own
    assert (HEAD in found.shared_modules) is shared
    assert EMBEDDING in found.shared_modules


def test_a_model_in_16_bit_has_the_head_that_one_variant_has(tmp_path):
    sources = {name: make_tied(tmp_path / name, name, h) for name, h in (("w8a8", OTHER), ("w4a16", None))}
    report = merge_checkpoints(sources, tmp_path / "merged")
    with_head, without = (report.variants[name].parameters for name in sources)
    assert with_head - without == 320 * 128 and report.bytes_16bit == 2 * with_head


def test_a_copy_of_the_embedding_comes_back_when_split(tmp_path):
    merged(tmp_path, w8a8=None, w4a16=COPY)
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "again")
    again, source = (tmp_path / name / "model.safetensors" for name in ("again", "w4a16"))
    assert f'"{HEAD}.weight"'.encode() in again.read_bytes()
    assert again.stat().st_size == source.stat().st_size


def test_a_head_of_another_shape_is_refused(tmp_path):
    sources = {s: make_tied(tmp_path / s, s, head) for s, head in (("w8a8", OTHER), ("w4a16", "short"))}
    with pytest.raises(FlexQuantError, match="'lm_head.weight' has shape"):
        merge_checkpoints(sources, tmp_path / "merged")


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_config_without_the_key_is_tied_where_its_class_says_so(tmp_path, architecture):
    sources = {
        s: without_key(make_tied(tmp_path / s, s, None, architecture), "tie_word_embeddings")
        for s in ("w8a8", "w4a16")
    }
    merge_checkpoints(sources, tmp_path / "merged")
    found, _ = read_merged_config(tmp_path / "merged")
    assert HEAD in found.shared_modules
    assert not any(variant.own_head for variant in found.variants.values())


def test_a_config_without_the_key_is_not_tied_where_its_class_says_so(tmp_path):
    sources = {
        s: without_key(make_tied(tmp_path / s, s, head), "tie_word_embeddings")
        for s, head in (("w8a8", COPY), ("w4a16", None))
    }
    with pytest.raises(FlexQuantError, match="'w8a8' has parameter 'lm_head.weight' and 'w4a16' does not"):
        merge_checkpoints(sources, tmp_path / "merged")


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


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("own_head", r"a wrong 'variants\.w8a8\.own_head' \(Field required\); merge it again"),
        (None, "schema_version 2, but this FlexQuant reads version 1; upgrade flexquant, or merge again"),
    ],
)
def test_a_section_of_another_layout_is_refused(tmp_path, key, problem):
    section = merged(tmp_path, w8a8=None, w4a16=None).to_json()
    if key is None:
        section["schema_version"] = 2
    else:
        del section["variants"]["w8a8"][key]
    with pytest.raises(FlexQuantError, match=problem):
        MergedConfig.from_json(section)


def test_a_shared_head_is_loaded_for_all(tmp_path):
    sources = {name: make_checkpoint(tmp_path / name, scheme=name) for name in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged")
    merged, _ = read_merged_config(tmp_path / "merged")
    routes = build_route_table(load_policy("phase"), sources, num_layers=2, max_tokens=64)
    loader = VariantLoader(dict.fromkeys(sources), merged, routes)
    assert merged.shared_modules[0] == HEAD and loader.wants(f"shared.{HEAD}.weight")
