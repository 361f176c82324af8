# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""On request, check before loading that the checkpoint is, byte for byte, what the merge wrote."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.recorded_hashes import check_recorded_files, check_recorded_tensors
from flexquant.errors import FlexQuantError
from flexquant.serving.options import ServingOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERIFIED = "FLEXQUANT_VERIFIED"
"""Environment variable with the folder that the front end has verified, so that its API servers skip it."""

logger = init_logger("vllm.flexquant.verification")


def verify_if_asked(vllm_config: VllmConfig) -> None:
    """In the front end: with the option ``verify``, read the checkpoint and compare it with its hashes.

    Each front end does so once; workers do not. Raises :class:`FlexQuantError`, which names the shard, for a
    byte that differs from what the merge wrote, and for a model that is no folder on this machine.
    """
    if not ServingOptions.from_vllm(vllm_config).verify:
        return
    folder = Path(vllm_config.model_config.model)
    if not folder.is_dir():
        raise FlexQuantError(
            f"additional-config 'flexquant.verify' needs a folder on this machine, and {folder} is none; "
            "download the checkpoint first, and serve the folder"
        )
    known = str(folder.resolve())
    if multiprocessing.parent_process() is not None and os.environ.get(VERIFIED) == known:
        return
    checkpoint = MergedCheckpoint.open(folder)
    check_recorded_files(checkpoint)
    count = check_recorded_tensors(checkpoint)
    os.environ[VERIFIED] = known
    logger.info("%s: %d tensors equal to recorded hashes", folder, count)
