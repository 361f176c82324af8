# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make the rows of token ids for calibration, from text that is read or that the model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.writer import Progress
from flexquant.documents.texts import SELF, draw_rows, read_documents
from flexquant.quantization.recipe import Calibration
from flexquant.quantization.source_model import SourceModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Sequence[Sequence[int]]
Stage = Callable[..., AbstractContextManager[Progress | None]]
"""Shows a stage to the user, e.g. as a progress bar.

It is called with the stage's title and, if progress can be counted, its ``unit``. It returns a context
manager that is entered while the stage lasts, and that yields a function of (units done, units in all), or
None.
"""


def no_stage(title: str, **unit: str) -> AbstractContextManager[None]:
    """Show no stage."""
    return nullcontext()


def calibration_rows(
    settings: Calibration,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    overwrite: bool,
    progress: Callable[[str], None],
    stage: Stage,
) -> Rows:
    """Return ``settings.samples`` rows of ``settings.length`` token ids, within one ``stage``.

    With SELF the model writes the text into the folder ``output``, unless an equal run has done so. Raises
    FlexQuantError for text that cannot be read or is too short, and for a file with another text in its
    place, unless ``overwrite`` is set.
    """
    if settings.data != SELF:
        if settings.data is None:
            progress("calibrating on Python's own documentation; text like your users' gives better accuracy")
        with stage("reading the calibration text"):
            return _draw(settings.data, settings, tokenizer)
    from flexquant.quantization.self_calibration import FILE, find_written, made_with, write_calibration

    file = output / FILE
    if find_written(file, made_with(source, settings), overwrite=overwrite):
        with stage(f"reading the calibration text that the model wrote into {file}"):
            return _draw(file, settings, tokenizer)
    with stage(f"the model writes its calibration text, {file}", unit=" tokens") as show:
        write_calibration(file, source, tokenizer, settings, show)
        return _draw(file, settings, tokenizer)


def _draw(
    data: str | Path | None, settings: Calibration, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    return draw_rows(
        read_documents(data),
        tokenizer,
        samples=settings.samples,
        length=settings.length,
        seed=settings.seed,
    )
