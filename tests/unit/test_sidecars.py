# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The files beside the weights: whatever a tokenizer is read from is taken along."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
import transformers
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from vllm.model_executor.models.registry import ModelRegistry

from flexquant.checkpoint.folder import COPIED, TOKENIZER, find_files
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint
from tests.checkpoints import make_checkpoint

VERSIONED = [f"mistral_instruct_tokenizer.model.{version.value}" for version in TokenizerVersion]


def test_a_tokenizer_in_mistrals_format_is_taken_along(tmp_path: Path) -> None:
    sources = {name: make_checkpoint(tmp_path / name, "mistral", name) for name in ("w8a8", "w4a16")}
    names = ["tekken.json", *VERSIONED]
    for folder in sources.values():
        for name in names:
            (folder / name).write_text("{}")
    merge_checkpoints(sources, tmp_path / "merged")
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "split")
    for name in names:
        assert (tmp_path / "merged" / name).is_file() and (tmp_path / "split" / name).is_file()

    (sources["w4a16"] / "tekken.json").write_text('{"vocab": []}')
    with pytest.raises(FlexQuantError, match=r"tokenizers of 'w8a8' and 'w4a16' differ: tekken\.json"):
        merge_checkpoints(sources, tmp_path / "again")


def test_a_notice_is_that_of_the_first_source_that_has_it(tmp_path: Path) -> None:
    sources = {name: make_checkpoint(tmp_path / name, scheme=name) for name in ("w8a8", "w4a16")}
    for variant, folder in sources.items():
        (folder / "LICENSE").write_text(variant)
    (sources["w4a16"] / "NOTICE").write_text("w4a16")
    merge_checkpoints(sources, tmp_path / "merged")
    assert [(tmp_path / "merged" / name).read_text() for name in ("LICENSE", "NOTICE")] == ["w8a8", "w4a16"]


def test_vocabularies_of_all_served_models_are_taken_along() -> None:
    served = set(ModelRegistry.get_supported_archs())
    left_behind, seen = set(), 0
    for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        tokenizer = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(kind) or "", None)
        if architecture not in served or tokenizer is None:
            continue
        seen += 1
        for name in tokenizer.vocab_files_names.values():
            if not any(fnmatch(name, pattern) for pattern in TOKENIZER):
                left_behind.add(f"{name} of {kind}")
    assert seen > 40 and not left_behind


def test_every_kind_of_file_beside_the_weights_is_found(tmp_path: Path) -> None:
    kinds = {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "qwen.tiktoken", "tekken.json"),
        *("tokenizer.model.v3", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
        *("processor_config.json", "preprocessor_config.json", "modeling_own.py", "generation_config.json"),
        *("LICENSE.md", "NOTICE", "USE_POLICY.md"),
    }
    others = {"model.safetensors", "optimizer.pt", "config.json", "README.md", "original/tokenizer.json"}
    for name in kinds | others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_files(tmp_path, COPIED) == {name: tmp_path / name for name in sorted(kinds)}
