# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write and read the files beside a variant's weights: its resolved recipe, and the report of the search.

Neither holds a time or a path of this machine, so equal inputs give equal bytes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

from pydantic import BaseModel

import flexquant
from flexquant.checkpoint.folder import RECIPE, read_json
from flexquant.checkpoint.measured_loss import KEY, LossByKind, read_losses
from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import different_keys, digest_of, hash_file, versions_of
from flexquant.documents.texts import SELF
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import FlexQuantError
from flexquant.quantization.recipe import SCHEMA, Calibration, VariantRecipe
from flexquant.quantization.resolve import ResolvedVariant
from flexquant.quantization.source_model import SourceModel

REPORT_FILE = "quantization_report.json"
REPORT_SCHEMA = "flexquant.quantization_report/v2"
PACKAGES = ("llmcompressor", "auto-round", "compressed-tensors", "torch", "transformers")

Rows = Sequence[Sequence[int]]
"""Calibration rows of token ids."""


def versions() -> dict[str, str]:
    """Return the versions of FlexQuant and of the packages that determine a variant's bytes."""
    missing = dict.fromkeys(PACKAGES, "not installed")
    return {"flexquant": flexquant.__version__, **missing, **versions_of(PACKAGES)}


def variant_inputs(
    source: SourceModel,
    recipe: VariantRecipe,
    rows: Rows | None,
    seed: int,
    nested_in: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return all that determines a variant, by what messages call it: hashes, the seed, the versions.

    ``rows`` is None for a recipe that needs no calibration, whose variant does not depend on the seed.
    ``nested_in`` has the inputs of the variant in which this one is to be nested. What only names things (the
    model's folder, the recipe's description, the calibration file) is no part of it.
    """
    return {
        "weights": source.weights_sha256,
        "model config": source.config_sha256,
        "recipe": digest_of(recipe.to_json(), sort_keys=False),
        "calibration rows": None if rows is None else digest_of(rows),
        "seed": None if rows is None else seed,
        "versions": versions(),
        **({} if nested_in is None else {"INT4 variant": digest_of(nested_in)}),
        **source.files_sha256,
    }


def portable_settings(calibration: Calibration) -> JsonObject:
    """Return the calibration settings; a file or folder is reduced to its name."""
    data = calibration.data
    if data is not None and data != SELF and (path := Path(os.path.expanduser(data))).exists():
        data = path.resolve().name
    return {**calibration.model_dump(), "data": data}


def resolved_document(
    recipe: VariantRecipe,
    description: str,
    calibration: Calibration,
    source: SourceModel,
    rows: Rows | None,
    losses: LossByKind,
) -> str:
    """Return the text of ``recipe.yaml``: the recipe with all choices made, its inputs, and what it lost."""
    document: JsonObject = {"schema": SCHEMA, "description": description}
    made_with = {**versions(), "model": source.label, "weights_sha256": source.weights_sha256}
    if rows is not None:
        document["calibration"] = portable_settings(calibration)
        made_with["calibration_rows_sha256"] = digest_of(rows)
    document["variants"] = {recipe.name: recipe.to_json()}
    document["made_with"] = made_with
    document[KEY] = {kind: loss.model_dump() for kind, loss in losses.items()}
    return to_yaml(document)


class Report(TypedDict, total=False):
    """What ``quantization_report.json`` holds."""

    schema: str
    made_from: Mapping[str, object]
    """All that determines the variant, see :func:`variant_inputs`."""
    calibration: JsonObject | None
    """Settings, and the SHA-256 of the rows; None for a recipe that needs none."""
    group_size: int | None
    quantized_linears: int
    notes: list[str]
    smoothing: JsonObject | None
    """What :func:`flexquant.quantization.modifiers.smoothing_report` returns."""
    distillation: JsonObject | None
    """Mean KL divergence of every epoch, in nats a token; None if no scales were trained."""
    files: Mapping[str, str]
    """SHA-256 of every other file of the folder."""


def write_report(folder: Path, report: Report) -> None:
    """Write the report into a variant's folder, after all other files, whose SHA-256 it lists."""
    document: Report = {"schema": REPORT_SCHEMA, **report, "files": _hash_files(folder)}
    (folder / REPORT_FILE).write_text(json.dumps(document, indent=2) + "\n")


def read_report(folder: Path, replaceable: bool = False) -> Report | None:
    """Return a report, or None; raise FlexQuantError if it is damaged, unless it is ``replaceable``."""
    file = folder / REPORT_FILE
    if not file.is_file():
        return None
    advice = f"replace {folder} with --overwrite, or choose another folder"
    try:
        report = cast("Report", read_json(file))
        if not all(isinstance(report.get(key), dict) for key in ("made_from", "files")):
            raise FlexQuantError(f"{file} lacks 'made_from' or 'files'")
    except FlexQuantError as e:
        if replaceable:
            return {}
        raise FlexQuantError(f"{e}; {advice}") from e
    return report


def find_difference(folder: Path, report: Report, made_from: Mapping[str, object]) -> str | None:
    """Return in what a variant is not what a run with these inputs would write; every file is read."""
    if report.get("schema") != REPORT_SCHEMA:
        return "was made by another release"
    if different := different_keys(made_from, report["made_from"]):
        return f"was made with different {', '.join(different)}"
    recorded, found = report["files"], _hash_files(folder)
    changes = []
    for name in different_keys(recorded, found):
        told = "has other content" if name in recorded else "was added"
        changes.append(f"{name} {told if name in found else 'is missing'}")
    return f"was changed after it was made: {', '.join(changes)}" if changes else None


class QuantizedVariant(BaseModel, frozen=True):
    """A folder that ``quantize_variants`` wrote, or found finished."""

    name: str
    folder: str
    kept: bool
    """Whether an earlier run had finished it, and ``resume`` kept it."""
    seconds: float
    """Seconds of quantising and writing, without loading the calibration data; 0 if it was kept."""
    num_bytes: int
    """Size of the safetensors files."""
    group_size: int | None
    """Input features that share one weight scale; None: one scale per output channel or tensor."""
    smoothed: int
    """Number of mappings that SmoothQuant smoothed."""
    mse_gain: float | None
    """Summed output MSE of all mappings with one alpha of 0.5, divided by that with the chosen alphas."""
    losses: LossByKind
    """What the variant lost against the 16-bit model."""


def read_quantized(variant: ResolvedVariant, folder: Path, kept: bool, seconds: float) -> QuantizedVariant:
    """Describe the finished ``folder`` of a variant, from its files and its report."""
    report = read_report(folder) or {}
    smoothing = report.get("smoothing") or {}
    return QuantizedVariant(
        name=variant.recipe.name,
        folder=str(folder),
        kept=kept,
        seconds=seconds,
        num_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        group_size=variant.group_size,
        smoothed=sum(m["chosen"] is not None for m in smoothing.get("mappings", {}).values()),
        mse_gain=smoothing.get("mse_gain"),
        losses=read_losses({variant.recipe.name: folder / RECIPE}).get(variant.recipe.name, {}),
    )


def _hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files but the report, by sorted name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / REPORT_FILE)
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in paths}
