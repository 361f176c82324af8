# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What the comparison refuses, a merge from end to end refuses too, and leaves nothing."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from flexquant.merge.formats import Source, open_source
from flexquant.merge.kv.compatibility import KVReport, check_kv_compatibility
from tests.architectures.models import random_model, small_config, split
from tests.checkpoints import StateDict, make_checkpoint, write_checkpoint
from tests.policies import rules
from tests.unit.edits import Edit, in_float32


def opened(folders: Mapping[str, Path]) -> list[Source]:
    return [open_source(name, folder) for name, folder in folders.items()]


def compare_and_refuse(sources: Sequence[Source], folder: Path) -> KVReport:
    """Compare variants; if they cannot share a cache, assert that merging them into ``folder`` is refused."""
    found = check_kv_compatibility(sources)
    if not found.compatible:
        folder.mkdir()
        (policy := folder.with_suffix(".yaml")).write_text(rules(f"- use: {sources[0].name}"))
        folders = {source.name: source.folder for source in sources}
        with pytest.raises(FlexQuantError) as refused:
            merge_checkpoints(folders, folder / "merged", policy=str(policy))
        assert str(refused.value) == found.message and not list(folder.iterdir())
    return found


@cache
def model_of(kind: str, **config: int) -> tuple[PreTrainedModel, StateDict, set[str], list[str]]:
    """Return a small model of a model type, and what :func:`tests.architectures.models.split` makes of it."""
    model = random_model(small_config(kind, **config))
    model.config.architectures = [type(model).__name__]
    return model, *split(model)


def report(
    tmp_path: Path, edit: Edit | None = None, architecture="llama", schemes=("w8a8", "w4a16"), **overrides
) -> KVReport:
    """Compare an untouched variant (the reference) with an edited one."""
    reference = make_checkpoint(tmp_path / "a", architecture, schemes[0])
    transform = None if edit is None else in_float32(edit)
    other = make_checkpoint(tmp_path / "b", architecture, schemes[1], transform=transform, **overrides)
    return compare_and_refuse(opened({"first": reference, "second": other}), tmp_path / "out")


def report_of(tmp_path: Path, kind: str, change: Callable, of_both: StateDict | None = None, **config: int):
    """Compare two roundings of a model of this type; ``change`` makes the second one's state dict."""
    model, state, quantised, left_out = model_of(kind, **config)
    state, how = state | (of_both or {}), (quantised, left_out)
    folders = {}
    for scheme in ("w8a8", "w4a16"):
        folders[scheme] = write_checkpoint(tmp_path / scheme, model.config, state, scheme, *how)
        state = change(state)
    return check_kv_compatibility(opened(folders))
