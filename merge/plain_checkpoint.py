# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write the plain checkpoint of one model: shards, config and the files beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import check_free_space, staged_folder
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.checkpoint.writer import (
    DEFAULT_SHARD_SIZE,
    Progress,
    copy_files,
    needed_bytes,
    plan_shards,
    write_json,
    write_shards,
)


def write_plain_checkpoint(
    output: Path,
    tensors: Mapping[str, TensorRef],
    config: JsonObject,
    files: Mapping[str, Path],
    *,
    overwrite: bool,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Progress | None = None,
    check: Callable[[Mapping[str, str]], None] = lambda digests: None,
) -> None:
    """Write ``tensors``, ``config.json`` and copies of ``files``, by name, to ``output``.

    The output appears only when it is complete and ``check``, which gets the SHA-256 of every tensor, has not
    raised. Raises FlexQuantError for a full disk, a tensor that cannot be read and what appeared meanwhile.
    """
    shards = plan_shards([tensors], max_shard_size)
    check_free_space(output, needed_bytes(shards, files.values()))
    with staged_folder(output, overwrite=overwrite) as stage:
        copy_files(files, stage)
        check(write_shards(stage, shards, progress))
        write_json(stage / "config.json", config)
