# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write the files beside a variant's weights: its resolved recipe, and the report of what was searched.

Neither holds a time or a path of this machine, so equal inputs give equal bytes. The report's ``made_from``
records all inputs of the variant: a restarted run keeps a variant that has the same inputs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import flexquant
from flexquant.checkpoint.folder import read_json
from flexquant.checkpoint.provenance import hash_file
from flexquant.checkpoint.writer import MAX_THREADS
from flexquant.documents.texts import SELF
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import FlexQuantError
from flexquant.quantization.recipe import SCHEMA, Calibration, VariantRecipe
from flexquant.quantization.source_model import SourceModel

REPORT_FILE = "quantization_report.json"
REPORT_SCHEMA = "flexquant.quantization_report/v2"
PACKAGES = ("llmcompressor", "auto-round", "compressed-tensors", "torch", "transformers")


def versions() -> dict[str, str]:
    """Return the versions of FlexQuant and of the packages that determine a variant's bytes."""
    found = {"flexquant": flexquant.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def rows_sha256(rows: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of calibration rows of token ids."""
    return _sha256([list(row) for row in rows])


def variant_inputs(
    source: SourceModel, recipe: VariantRecipe, rows: Sequence[Sequence[int]] | None, seed: int
) -> dict[str, object]:
    """Return all that determines a variant, by what messages call it: hashes, the seed, the versions.

    ``rows`` of token ids is None for a recipe that needs no calibration, whose variant depends neither on
    them nor on the seed. What only names things (the model's folder, the recipe's description, the file of
    the calibration text) is no part of it.
    """
    return {
        "weights": source.weights_sha256,
        "model config": source.config_sha256,
        "recipe": _sha256(recipe.to_json()),
        "calibration rows": None if rows is None else rows_sha256(rows),
        "seed": None if rows is None else seed,
        "versions": versions(),
        **source.files_sha256,
    }


def portable_settings(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration settings; a file or folder is reduced to its name."""
    data = calibration.data
    if data is not None and data != SELF and Path(data).expanduser().exists():
        data = Path(data).expanduser().resolve().name
    return {**calibration.model_dump(), "data": data}


def resolved_document(
    recipe: VariantRecipe,
    description: str,
    calibration: Calibration,
    source: SourceModel,
    rows: Sequence[Sequence[int]] | None,
) -> str:
    """Return the text of ``recipe.yaml``: the variant's recipe with all choices made, and its inputs."""
    document: dict[str, Any] = {"schema": SCHEMA, "description": description}
    made_with = {**versions(), "model": source.label, "weights_sha256": source.weights_sha256}
    if rows is not None:
        document["calibration"] = portable_settings(calibration)
        made_with["calibration_rows_sha256"] = rows_sha256(rows)
    document["variants"] = {recipe.name: recipe.to_json()}
    document["made_with"] = made_with
    return to_yaml(document)


def smoothing_report(
    chosen: Mapping[str, float | None],
    errors: Mapping[str, Mapping[float | None, float]],
    power: Mapping[str, float],
    reference: float = 0.5,
) -> dict[str, Any] | None:
    """Return every strength's output MSE for each mapping, and totals compared with one strength for all.

    ``summed_mse`` is dominated by the layers with the largest outputs; ``relative_mse`` is therefore the mean
    over mappings of MSE divided by the outputs' mean square. None if nothing was smoothed.
    """
    if not chosen:
        return None
    if not errors:
        return {"mappings": {name: {"chosen": alpha} for name, alpha in chosen.items()}}
    alphas = [a for a in next(iter(errors.values())) if a is not None]
    best = min(alphas, key=lambda a: math.fsum(found[a] for found in errors.values()))
    ways: dict[str, Mapping[str, float | None]] = {
        "per_mapping": chosen,
        "best_single": dict.fromkeys(errors, best),
        f"all_{reference}": dict.fromkeys(errors, reference),
        "none": dict.fromkeys(errors, None),
    }
    sums = {way: math.fsum(errors[n][by[n]] for n in errors) for way, by in ways.items()}
    shares = {
        way: math.fsum(errors[n][by[n]] / power[n] for n in errors if power[n]) / len(errors)
        for way, by in ways.items()
    }
    return {
        "best_single_alpha": best,
        "summed_mse": sums,
        "relative_mse": shares,
        "ratios_to_per_mapping": {
            measure: {way: _ratio(found[way], found["per_mapping"]) for way in ways if way != "per_mapping"}
            for measure, found in (("summed_mse", sums), ("relative_mse", shares))
        },
        "mappings": {
            name: {
                "chosen": chosen[name],
                "mse": found[chosen[name]],
                f"mse_at_{reference}": found[reference],
                f"ratio_{reference}_to_chosen": _ratio(found[reference], found[chosen[name]]),
                "output_mean_square": power[name],
                "mse_by_alpha": {("none" if a is None else str(a)): e for a, e in found.items()},
            }
            for name, found in errors.items()
        },
    }


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write the report into a variant's folder, after all other files, whose SHA-256 it lists."""
    document = {"schema": REPORT_SCHEMA, **report, "files": _hash_files(folder)}
    (folder / REPORT_FILE).write_text(json.dumps(document, indent=2) + "\n")


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return a variant's report, or None if there is none; raise FlexQuantError for a damaged report."""
    file = folder / REPORT_FILE
    if not file.is_file():
        return None
    advice = f"replace {folder} with --overwrite, or choose another folder"
    try:
        report = read_json(file)
    except FlexQuantError as e:
        raise FlexQuantError(f"{e}; {advice}") from e
    if not all(isinstance(report.get(key), dict) for key in ("made_from", "files")):
        raise FlexQuantError(f"{file} lacks 'made_from' or 'files'; {advice}")
    return report


def find_changes(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each file that differs from the report; every file is read."""
    recorded, found = report["files"], _hash_files(folder)
    changes = {name: "is missing" if name not in found else "has other content" for name in recorded}
    changes |= {name: "was added" for name in found if name not in recorded}
    return [f"{name} {change}" for name, change in changes.items() if recorded.get(name) != found.get(name)]


def _hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files but the report, by sorted name; several threads read at a time."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / REPORT_FILE)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        digests = pool.map(hash_file, paths)
        return {p.relative_to(folder).as_posix(): d for p, d in zip(paths, digests, strict=True)}


def _sha256(data: object) -> str:
    """Return the SHA-256 of JSON-able data; the order of keys counts, as for a recipe's modifiers."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
