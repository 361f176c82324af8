# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the comparison refuses, a merge from end to end refuses too, and leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.merge.formats import Source
from flexquant.merge.kv.compatibility import KVReport, check_kv_compatibility


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
