# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the comparison refuses, a merge from end to end refuses too, and leaves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.merge.formats import Source, open_source
from flexquant.merge.kv.compatibility import KVReport, check_kv_compatibility
from tests.architectures.models import random_model, small_config, split
from tests.checkpoints import StateDict


def opened(folders: Mapping[str, Path]) -> list[Source]:
    return [open_source(name, folder) for name, folder in folders.items()]


def compare_and_refuse(sources: Sequence[Source], folder: Path) -> KVReport:
    """Compare variants; if they cannot share a cache, assert that merging them into ``folder`` is refused."""
    found = check_kv_compatibility(sources)
    if not found.compatible:
        folder.mkdir()
        with pytest.raises(FlexQuantError) as refused:
            merge_checkpoints({source.name: source.folder for source in sources}, folder / "merged")
        assert str(refused.value) == found.message
        assert not list(folder.iterdir())
    return found


@cache
def model_of(kind: str, **config: int) -> tuple[PreTrainedModel, StateDict, set[str], list[str]]:
    """Return a small model of a model type, and what :func:`tests.architectures.models.split` makes of it."""
    model = random_model(small_config(kind, **config))
    model.config.architectures = [type(model).__name__]
    return model, *split(model)
