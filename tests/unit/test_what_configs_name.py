# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a checkpoint's files name is neither loaded nor fetched nor run, and changes no answer."""

from __future__ import annotations

import os
import re
import shutil

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from flexquant.checkpoint.built_model import build_config
from flexquant.checkpoint.folder import read_json
from flexquant.merge import convert_checkpoint, merge_checkpoints, split_checkpoint
from tests.checkpoints import make_checkpoint
from tests.refusals import refused
from tests.what_configs_name import KERNEL, KEYS, MAY_REFUSE, run_all


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, str, str]]]:
    folder = tmp_path_factory.mktemp("named")
    made = {n: make_checkpoint(folder / n, scheme=n, num_layers=1) for n in ("w8a8", "w4a16")}
    plain = make_checkpoint(folder / "plain", scheme=None, num_layers=1)
    merge_checkpoints(made, folder / "inspect" / "a")
    for command, pair in {"merge": made.values(), "convert": made.values(), "advise": (plain, plain)}.items():
        for name, source in zip("ab", pair, strict=True):
            shutil.copytree(source, folder / command / name)
    shutil.copytree(folder / "inspect" / "a", folder / "inspect" / "b")
    return run_all(folder, KERNELS_MIN_VERSION, ["merge", "convert", "inspect", "advise"])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("command", ["merge", "convert", "inspect", "advise"])
def test_what_is_named_is_not_touched(found, command, key):
    status, said, touched = found[command][key]
    assert not touched
    if key not in MAY_REFUSE:
        assert (status, said) == tuple(found[command]["nothing"][:2]) and status == 0
    elif status:
        assert re.fullmatch(rf"flexquant {command}: error: .*; .*", said)


@pytest.mark.parametrize(
    "key",
    ["attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"]
    + ["auto_map", "transformers_weights", "quantization_config"],
)
def test_a_config_is_built_without(key):
    layer = {"intermediate_size": 96, key: KERNEL}
    config = {"model_type": "llama", "num_hidden_layers": 1, key: KERNEL, "per_layer_config": {"0": layer}}
    built = build_config(config)
    assert KERNEL not in f"{built.to_dict()} {built._attn_implementation} {built._experts_implementation}"
    assert built.per_layer_config[0].intermediate_size == 96


def test_infinities_are_numbers(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("mamba2").save_pretrained(tmp_path)
    assert build_config(read_json(tmp_path / "config.json")).time_step_limit[1] == float("inf")


@pytest.mark.parametrize(
    "name", ["LICENSE.txt", "additional_chat_templates/a.jinja", "vocab.json", "pipe.model"]
)
def test_what_is_not_a_file_of_the_folder_is_not_copied(name, tmp_path):
    sources = {n: make_checkpoint(tmp_path / n, scheme=n, num_layers=1) for n in ("w8a8", "w4a16")}
    merge_checkpoints(sources, tmp_path / "merged")
    (tmp_path / "secret").write_text("{}")
    for folder in (*sources.values(), tmp_path / "merged"):
        (folder / name).parent.mkdir(exist_ok=True)
        if name == "pipe.model":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to(tmp_path / "secret")
    output = tmp_path / "output"
    for make in (
        lambda: merge_checkpoints(sources, output),
        lambda: convert_checkpoint(sources["w8a8"], output, dtype="float16"),
        lambda: split_checkpoint(tmp_path / "merged", "w8a8", output),
    ):
        with refused(rf"'{name}'( leads outside the|; download)"):
            make()
        assert not output.exists()
