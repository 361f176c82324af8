# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""From a model's name to checkpoint folders: synthetic ones are made when first needed, real ones given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.speed.shapes import SHAPES, Shape
from benchmarks.speed.subjects import MERGED, Subject
from benchmarks.speed.synthetic import SCHEMES, write_checkpoint, write_without_weights
from flexquant.errors import FlexQuantError

NESTED = "nested"


@dataclass(frozen=True)
class Model:
    """Where the checkpoints of one model are."""

    name: str
    shape: Shape
    folders: dict[str, Path] | None
    """Variant, ``merged`` or ``nested`` -> folder of a real model; None for a synthetic one."""
    work: Path
    """Folder in which synthetic checkpoints are made."""

    def folder(self, subject: Subject) -> Path:
        """Return the checkpoint that a subject serves; make it if the model is synthetic."""
        if self.folders is not None:
            key = subject.checkpoint
            if key not in self.folders:
                raise FlexQuantError(
                    f"subject '{subject.name}' needs the checkpoint '{key}' of {self.name}, but given are "
                    f"{', '.join(self.folders)}; add {key}=FOLDER to --model, or leave it out of --subjects"
                )
            return self.folders[key]
        if subject.given:
            raise FlexQuantError(
                f"subject '{subject.name}' names one of given checkpoints, but {self.name} is synthetic; "
                f"write --model {subject.given}=FOLDER ..."
            )
        sources = {name: self._synthetic(name) for name in subject.variants}
        return self._merged(sources) if subject.is_merged else sources[subject.variants[0]]

    def _synthetic(self, scheme: str) -> Path:
        folder = self.work / self.name / scheme
        if not folder.exists():
            print(f"making {self.name} in {scheme}", flush=True)
            write_checkpoint(folder, self.shape, scheme)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return folder

    def without_weights(self, variants: Sequence[str]) -> Path:
        """Return a merged checkpoint of this shape without tensors, which vLLM loads with dummy weights."""
        folder = self.work / self.name / "without-weights"
        if not folder.exists():
            write_without_weights(folder, self.shape, variants)
        return folder

    def _merged(self, sources: dict[str, Path]) -> Path:
        from flexquant.merge import merge_checkpoints

        folder = self.work / self.name / "-".join([MERGED, *sources])
        if not folder.exists():
            print(f"merging {' and '.join(sources)} of {self.name}", flush=True)
            merge_checkpoints(sources, folder, policy=f"{'fp8-' if 'fp8' in sources else ''}phase-batch")
        return folder


def open_model(values: Sequence[str], work: Path) -> Model:
    """Return the model for the values of ``--model``: one name, or VARIANT=FOLDER for each checkpoint.

    Raises FlexQuantError for an unknown name or variant and for a folder that is no checkpoint.
    """
    if len(values) == 1 and "=" not in values[0]:
        if values[0] not in SHAPES:
            raise FlexQuantError(
                f"'{values[0]}' is not a model; choose from {', '.join(SHAPES)}, or give real checkpoints as "
                "VARIANT=FOLDER ..."
            )
        return Model(values[0], SHAPES[values[0]], None, work)
    allowed = (*SCHEMES, MERGED, NESTED)
    folders: dict[str, Path] = {}
    for value in values:
        variant, _, folder = value.partition("=")
        if variant not in allowed or not folder:
            raise FlexQuantError(
                f"'{value}' does not name a checkpoint; write VARIANT=FOLDER, with a variant of "
                f"{', '.join(allowed)}"
            )
        if not (Path(folder) / "config.json").is_file():
            raise FlexQuantError(f"{folder} is not a checkpoint folder (no config.json); correct '{value}'")
        folders[variant] = Path(folder)
    first = next(iter(folders.values()))
    try:
        shape = Shape.from_config(json.loads((first / "config.json").read_text(encoding="utf-8")))
    except (KeyError, ValueError) as e:
        raise FlexQuantError(f"{first / 'config.json'} does not name the sizes of the model: {e!r}") from e
    name = first.resolve()
    return Model(name.parent.name if name.name in allowed else name.name, shape, folders, work)
