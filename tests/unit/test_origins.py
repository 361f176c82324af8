# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The card says how each variant was made, as its recipe tells; a tokenizer's files come along."""

from fnmatch import fnmatch
from pathlib import Path

import pytest
import transformers
from huggingface_hub import ModelCard
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from vllm.model_executor.models.registry import ModelRegistry

from flexquant.checkpoint.folder import COPIED, TOKENIZER, find_files
from flexquant.checkpoint.measured_loss import loss_lines, read_losses
from flexquant.merge import merge_checkpoints, split_checkpoint
from flexquant.merge.card import describe_origins
from tests.checkpoints import make_checkpoint, make_pair
from tests.refusals import refused

RECIPE = """
schema: flexquant.recipe/v1
calibration: {data: chats.jsonl, samples: 64, length: 512, seed: 7}
variants:
  int8:
    SmoothQuantModifier: {smoothing_strength: {a: 0.8, b: 0.5, c: null, d: 0.7}}
    GPTQModifier: {scheme: W8A8, ignore: [lm_head]}
    head: int8
    nested_in: int4
made_with: {llmcompressor: 0.14.0.1, model: org/model, weights_sha256: abc, calibration_rows_sha256: def}
"""


def described(folder: Path, recipe: str, *names: str) -> list[str]:
    """Return what the card says of variants, the first of which has this recipe."""
    (folder / "recipe.yaml").write_text(recipe)
    return describe_origins(names, {f"recipe.{names[0]}.yaml": folder / "recipe.yaml"}).splitlines()


def test_our_recipes_are_told_in_full(tmp_path):
    # A variant may be merged under another name than the one it was quantised under.
    assert described(tmp_path, RECIPE, "w8a8") == [
        "- `w8a8`: from org/model (weights with SHA-256 `abc`), calibrated on chats.jsonl: 64 samples of 512 "
        "tokens, seed 7 (token ids with SHA-256 `def`), by llmcompressor 0.14.0.1. In order, and in full in "
        "`recipe.w8a8.yaml`:",
        "  - SmoothQuantModifier: smoothing_strength 0.5 to 0.8, chosen for each of 4 modules",
        "  - GPTQModifier: scheme W8A8; ignore [lm_head]",
        "  - head: int8",
        "  - nested_in: int4",
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [("null", "Python's language reference")]
    + [("self", "text of many kinds, of which the model wrote a part")],
)
def test_calibration_data_that_is_no_file_is_said_in_words(tmp_path, data, said):
    (first, *_) = described(tmp_path, RECIPE.replace("chats.jsonl", data), "w8a8")
    assert f"calibrated on {said}: 64 samples" in first


def test_other_recipes_are_named_and_missing_ones_said(tmp_path):
    changes = {"seed: 7": "seed: !!int x", "length: 512, ": "", "model: org/model, ": ""}
    changes |= {"  int8:\n": "  int4: {}\n  int8:\n"}
    others = ["scheme: w8a8\n", "default_stage: {default_modifiers: {}}", "- : [", RECIPE.split("made")[0]]
    others += ["schema: flexquant.recipe/v1\nvariants: 7\nmade_with: 8\n", "[" * 5000]
    for text in (*others, *(RECIPE.replace(old, new) for old, new in changes.items())):
        assert described(tmp_path, text, "w8a8", "w4a16") == [
            "- `w8a8`: by `recipe.w8a8.yaml`, as it came with the source.",
            "- `w4a16`: its source came without a recipe.",
        ]


@pytest.mark.parametrize(
    ("stated", "bases"),
    [("org/a", ["org/a"]), ("[org/a, 7, [org/b], null]", ["org/a"]), ("7", None)]
    + [("{org/a: org/b}", None), ("true", None), ("[" * 900 + "]" * 900, None), (None, None)],
)
def test_only_names_of_base_models_are_carried_over(stated, bases, tmp_path):
    """None: the card is a pointer that git-lfs did not follow."""
    card = f"---\nbase_model: {stated}\nlicense: {{a: b}}\n---\nText.\n"
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4096\n"
    source = make_checkpoint(tmp_path / "w8a8", num_layers=1)
    (source / "README.md").write_text(pointer if stated is None else card)
    merge_checkpoints({"w8a8": source}, tmp_path / "merged")
    found = ModelCard.load(tmp_path / "merged/README.md").data.to_dict()
    assert (found.get("base_model"), found.get("license")) == (bases, None)


def test_a_licence_is_carried_over_if_all_sources_state_it(tmp_path):
    sources = make_pair(tmp_path, num_layers=1)
    for source, licence in zip(sources.values(), ("mit", "apache-2.0"), strict=True):
        (source / "README.md").write_text(f"---\nlicense: {licence}\nlanguage: en\n---\nText.\n")
    merge_checkpoints(sources, tmp_path / "merged")
    found = ModelCard.load(tmp_path / "merged/README.md").data.to_dict()
    assert (found.get("license"), found.get("language")) == (None, "en")


def test_the_card_does_not_promise_another_format_back(tmp_path):
    source = make_checkpoint(tmp_path / "bf16", scheme=None, num_layers=1)
    merge_checkpoints({"bf16": source}, tmp_path / "merged")
    text = (tmp_path / "merged/README.md").read_text()
    assert "One variant of one LlamaForCausalLM" in text
    assert "`flexquant split` writes one variant as a plain checkpoint again" in text


MEASURED = """schema: flexquant.recipe/v1
measured:
  code: {documents: 2, kl: KL, kl_error: 0.01, perplexity: PERPLEXITY, perplexity_error: .inf, same_top: 0.5}
"""


def lines(folder: Path, kl: str, perplexity: str, bound: float = 0.1) -> list[str]:
    (folder / "recipe.yaml").write_text(MEASURED.replace("KL", kl, 1).replace("PERPLEXITY", perplexity))
    return loss_lines(read_losses({"w4a16": folder / "recipe.yaml"}), bound)


@pytest.mark.parametrize(
    "kl, perplexity",
    [(".nan", "0.01"), ("0.01", ".nan"), ("-.inf", "0.01"), ("0.01", ".inf"), ("null", "null")],
)
def test_what_is_no_finite_number_is_too_much(kl: str, perplexity: str, tmp_path: Path) -> None:
    *table, said = lines(tmp_path, kl, perplexity, bound=1e9)
    assert "is lost by w4a16 on code. What helps" in said
    assert "not finite" in table[-1] and "nan" not in said.lower() + table[-1].lower()


@pytest.mark.parametrize(
    ("kl", "perplexity", "too_much"),
    [("0.1", "0.1", False), ("0.101", "0.01", True), ("0.01", "0.101", True), ("null", "0.01", True)],
)
def test_either_of_the_two_may_be_too_much(kl: str, perplexity: str, too_much: bool, tmp_path: Path) -> None:
    assert ("is lost by w4a16" in lines(tmp_path, kl, perplexity)[-1]) is too_much


VERSIONED = [f"mistral_instruct_tokenizer.model.{version.value}" for version in TokenizerVersion]


def test_a_tokenizer_in_mistrals_format_is_taken_along(tmp_path: Path) -> None:
    sources = make_pair(tmp_path, "mistral")
    names = ["tekken.json", *VERSIONED]
    for folder in sources.values():
        for name in names:
            (folder / name).write_text("{}")
    merge_checkpoints(sources, tmp_path / "merged")
    split_checkpoint(tmp_path / "merged", "w4a16", tmp_path / "split")
    for name in names:
        assert (tmp_path / "merged" / name).is_file() and (tmp_path / "split" / name).is_file()
    (sources["w4a16"] / "tekken.json").write_text('{"vocab": []}')
    with refused(r"tokenizers of 'w8a8' and 'w4a16' differ: tekken\.json"):
        merge_checkpoints(sources, tmp_path / "again")


def test_a_notice_is_that_of_the_first_source_that_has_it(tmp_path: Path) -> None:
    sources = make_pair(tmp_path)
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
