# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Variants merge whatever release of transformers saved their processor; other processors need a choice."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from flexquant.merge import merge_checkpoints
from flexquant.merge.formats import Source, open_source
from flexquant.merge.merge_plan import plan_merge
from flexquant.merge.same_inputs import processor_difference
from tests.refusals import refused
from tests.vision import KINDS, make_vision_checkpoint

Files = dict[str, dict[str, Any]]
"""Name of a JSON file without its ending -> what it holds."""
BOUNDS = {"min": "shortest", "max": "longest"}
OF_A_PART = {
    "crop_size": None,
    "data_format": "channels_first",
    "default_to_square": False,
    "device": None,
    "do_center_crop": None,
    "do_convert_rgb": True,
    "return_tensors": None,
}
"""Part of what transformers 4 wrote of each part of a processor."""


def of_transformers_4(processor: dict[str, Any]) -> Files:
    """Return the files in which transformers 4 wrote a processor, with defaults and old names."""
    files = {"processor_config": {k: v for k, v in processor.items() if not k.endswith("_processor")}}
    image = processor["image_processor"]
    kind = f"{image['image_processor_type']}Fast"
    files["preprocessor_config"] = {**image, **OF_A_PART, "image_processor_type": kind}
    if video := processor.get("video_processor"):
        edges = {f"{at}_pixels": video["size"][f"{edge}_edge"] for at, edge in BOUNDS.items()}
        files["video_preprocessor_config"] = {**video, **OF_A_PART, **edges, "max_frames": 768}
    return files


def write(folder: Path, files: Files) -> None:
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def sources(folder: Path, kind: str, files: Files) -> dict[str, Path]:
    """Return W8A8 with the processor's files of transformers 5, and W4A16 with these."""
    made = {v: make_vision_checkpoint(folder / v, v, KINDS[kind]) for v in ("w8a8", "w4a16")}
    write(made["w4a16"], files)
    return made


def opened(variants: dict[str, Path]) -> list[Source]:
    return [open_source(name, folder) for name, folder in variants.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_both_releases_of_transformers_write_one_processor(tmp_path, kind):
    processor = deepcopy(KINDS[kind].processor)
    if video := processor.get("video_processor"):
        video["size"]["shortest_edge"] //= 4
    variants = sources(tmp_path, kind, of_transformers_4(processor))
    write(variants["w8a8"], {"processor_config": processor})
    assert processor_difference(*opened(variants)) is None
    assert plan_merge(opened(variants)).sidecars.files["processor_config.json"].parent == variants["w8a8"]


EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "image_processor, 'image_mean'": ("preprocessor_config", {"image_mean": [0.1, 0.2, 0.3]}),
    "image_processor, 'size': 'longest_edge': 56 against 1456": ("preprocessor_config", {"size": None}),
    "image_processor, 'do_normalize': True against False": ("preprocessor_config", {"do_normalize": False}),
    "image_processor, 'do_image_splitting': True against None": (
        "preprocessor_config",
        {"image_processor_type": "SiglipImageProcessor"},
    ),
    "class, 'processor_class': 'Idefics3Processor' against": (
        "processor_config",
        {"processor_class": "Gemma3Processor"},
    ),
    "processor, 'image_seq_len': 4 against 169": ("processor_config", {"image_seq_len": None}),
}
"""What a message names -> file, and the edit of it."""


@pytest.mark.parametrize("named", EDITS)
def test_processors_that_do_something_else_need_a_choice(tmp_path, named):
    files = of_transformers_4(KINDS["idefics3"].processor)
    file, edit = EDITS[named]
    files[file] |= edit
    variants = sources(tmp_path, "idefics3", files)
    with refused(f"the processors of 'w8a8' and 'w4a16' differ: {named}.*--processor-from w4a16"):
        merge_checkpoints(variants, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merge_checkpoints(variants, tmp_path / "merged", processor_from="w4a16")
    for name, content in files.items():
        assert json.loads((tmp_path / "merged" / f"{name}.json").read_text()) == content


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_videos_are_compared_with_the_defaults_of_a_class_that_needs_torchvision(tmp_path, kind):
    files = of_transformers_4(KINDS[kind].processor)
    files["video_preprocessor_config"]["max_frames"] = 7
    difference = processor_difference(*opened(sources(tmp_path, kind, files)))
    assert difference == "video_processor, 'max_frames': 768 against 7"


def test_a_processor_that_one_source_has_comes_along(tmp_path):
    variants = sources(tmp_path, "idefics3", {})
    write(variants["w8a8"], {})
    parts = of_transformers_4(KINDS["idefics3"].processor)
    write(variants["w4a16"], parts)
    merge_checkpoints(variants, tmp_path / "merged")
    assert {path.stem for path in (tmp_path / "merged").glob("*processor_config.json")} == parts.keys()


def test_the_files_come_from_the_source_that_has_more_parts(tmp_path):
    whole = KINDS["idefics3"].processor
    variants = sources(tmp_path, "idefics3", {"processor_config": whole})
    write(variants["w8a8"], {"processor_config": of_transformers_4(whole)["processor_config"]})
    merge_checkpoints(variants, tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "processor_config.json").read_text()) == whole


def test_settings_that_no_class_takes_are_refused_with_the_choice(tmp_path):
    files = of_transformers_4(KINDS["idefics3"].processor)
    files["preprocessor_config"]["size"] = "wide"
    with refused(r"the processor in .*w4a16 cannot be read .*--processor-from"):
        merge_checkpoints(sources(tmp_path, "idefics3", files), tmp_path / "merged")


def test_code_that_a_processor_names_is_not_run(tmp_path):
    files = of_transformers_4(KINDS["idefics3"].processor)
    kind = {"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "mine.Mine"}}
    files["preprocessor_config"] |= kind
    variants = sources(tmp_path, "idefics3", files)
    (variants["w4a16"] / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    assert processor_difference(*opened(variants)) and not (tmp_path / "ran").exists()
