# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure what nested variants of a merged checkpoint lost, some of whose integers merging changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.measured_loss import LossByKind
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.merge import split_checkpoint
from flexquant.quantization.progress import quiet_libraries
from flexquant.quantization.source_model import find_folder, read_source


def measure_nested(
    model: str | Path, merged: Path, progress: Callable[[str], None], verbose: bool
) -> dict[str, LossByKind]:
    """Return what each nested variant of ``merged`` lost against the 16-bit ``model``, by kind of text."""
    losses: dict[str, LossByKind] = {}
    with nullcontext() if verbose else quiet_libraries(progress):
        from flexquant.quantization.loss import measure_loss, read_reference
        from flexquant.quantization.oneshot import load_quantized, load_whole

        folder = find_folder(model, progress)
        reference = read_reference(load_whole(read_source(folder)), load_tokenizer(folder))
        for name in MergedCheckpoint.open(merged).merged.nested:
            with TemporaryDirectory(dir=merged.parent) as work:
                split_checkpoint(merged, name, Path(work) / name)
                losses[name] = measure_loss(load_quantized(Path(work) / name), reference)
    return losses
